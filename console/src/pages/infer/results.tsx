import { useEffect, useRef, useState } from "preact/hooks";
import { prettyJson } from "../../playground/json";
import { Button } from "../../ui/button";
import { Copy } from "../../ui/copy";
import { Badge, Panel } from "../../ui/layout";
import { findPicture, toPixels, type ImageLayout } from "./image";
import { responses, result, type Result } from "./state";
import { countElements, type Element, type Tensor } from "./types";

const MOST_ROWS = 50;
const MOST_COLUMNS = 32;

/** What the model answered: each output as a picture, as texts or as a table. */
export function Results() {
  const now = result.value;
  return (
    <>
      {responses.value.length > 0 && <Responses />}
      {now && <Summary now={now} />}
      {now?.outputs.map((each) => (
        <Panel key={each.name} title={<code>{each.name}</code>} actions={<Copy text={asJson(each)} label={`Copy ${each.name} as JSON`} />}>
          <p class="field-hint">
            {each.datatype} [{each.shape.join(", ")}]
          </p>
          <OutputView tensor={each} />
        </Panel>
      ))}
    </>
  );
}

function Summary({ now }: { now: Result }) {
  return (
    <p class="message-summary" role="status">
      <Badge tone="good">done</Badge>
      <span>{now.ms.toFixed(1)} ms, the way to the server and back included</span>
      {now.version && <span>version {now.version}</span>}
      {responses.value.length > 0 && <span>responses: {responses.value.length}</span>}
    </p>
  );
}

/** The responses of a stream; those of a language model also as one text. */
function Responses() {
  const all = responses.value;
  const text = all.map((each) => (typeof each.text_output === "string" ? each.text_output : "")).join("");
  return (
    <Panel title={`Responses (${all.length})`}>
      {text && <p class="message-text">{text}</p>}
      <div class="responses" role="log" aria-label="Responses" tabIndex={0}>
        {all.map((each, n) => (
          <code key={n}>{JSON.stringify(each)}</code>
        ))}
      </div>
    </Panel>
  );
}

function asJson({ name, datatype, shape, elements }: Tensor): string {
  const data = elements.map((each) => (typeof each === "bigint" ? String(each) : JSON.stringify(plain(each))));
  return `${JSON.stringify({ name, datatype, shape }).slice(0, -1)},"data":[${data.join(",")}]}`;
}

function plain(element: Element): unknown {
  return element instanceof Uint8Array ? Array.from(element) : element;
}

function OutputView({ tensor }: { tensor: Tensor }) {
  if (tensor.datatype === "BYTES") return <Texts elements={tensor.elements} />;
  const layout = findPicture(tensor);
  return (
    <>
      {layout && <Picture tensor={tensor} layout={layout} />}
      <Matrices tensor={tensor} />
    </>
  );
}

function Texts({ elements }: { elements: Element[] }) {
  const [numShown, show] = useState(MOST_ROWS);
  return (
    <div class="texts">
      {elements.slice(0, numShown).map((each, n) =>
        each instanceof Uint8Array ? (
          <Bytes key={n} bytes={each} number={n} />
        ) : (
          <pre key={n} tabIndex={0} aria-label={`Element ${n}`}>
            {prettyJson(String(each))}
          </pre>
        ),
      )}
      {elements.length > numShown && <More onMore={() => show(numShown * 4)} left={elements.length - numShown} />}
    </div>
  );
}

/** Bytes that are no text: an image, where they begin as one. */
function Bytes({ bytes, number }: { bytes: Uint8Array; number: number }) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([new Uint8Array(bytes)]));
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [bytes]);
  if (isImage(bytes)) return <img class="picture" src={url} alt={`Element ${number}`} />;
  return <p>{bytes.length} bytes that are no text</p>;
}

function isImage(bytes: Uint8Array): boolean {
  const starts = [[0x89, 0x50, 0x4e, 0x47], [0xff, 0xd8, 0xff], [0x47, 0x49, 0x46, 0x38], [0x52, 0x49, 0x46, 0x46]];
  return starts.some((start) => start.every((each, n) => bytes[n] === each));
}

function Picture({ tensor, layout }: { tensor: Tensor; layout: ImageLayout }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const pixels = toPixels(tensor.elements.map(Number), layout);
    canvas.current?.getContext("2d")?.putImageData(new ImageData(pixels, layout.width, layout.height), 0, 0);
  }, [tensor]);
  const label = `${tensor.name} as a picture of ${layout.width} by ${layout.height}`;
  return <canvas class="picture" ref={canvas} width={layout.width} height={layout.height} role="img" aria-label={label} />;
}

/** A tensor as tables of its last two dimensions, one below the other. */
function Matrices({ tensor }: { tensor: Tensor }) {
  const { shape, elements } = tensor;
  const [numShown, show] = useState(1);
  const numColumns = shape.at(-1) ?? 1;
  const numRows = shape.at(-2) ?? 1;
  const outer = shape.slice(0, -2);
  const numMatrices = countElements(outer);
  const size = numRows * numColumns;
  return (
    <>
      {Array.from({ length: Math.min(numShown, numMatrices) }, (_, n) => (
        <Matrix
          key={n}
          caption={outer.length ? `${tensor.name}[${indexOf(n, outer).join(", ")}]` : tensor.name}
          elements={elements.slice(n * size, (n + 1) * size)}
          numRows={numRows}
          numColumns={numColumns}
        />
      ))}
      {numMatrices > numShown && <More onMore={() => show(numShown + 8)} left={numMatrices - numShown} />}
    </>
  );
}

function indexOf(position: number, shape: number[]): number[] {
  let rest = position;
  return [...shape]
    .reverse()
    .map((size) => {
      const at = rest % size;
      rest = Math.floor(rest / size);
      return at;
    })
    .reverse();
}

interface MatrixProps {
  caption: string;
  elements: Element[];
  numRows: number;
  numColumns: number;
}

function Matrix({ caption, elements, numRows, numColumns }: MatrixProps) {
  const [numShown, show] = useState(MOST_ROWS);
  const columns = Math.min(numColumns, MOST_COLUMNS);
  const rows = Math.min(numRows, numShown);
  return (
    <div class="table-scroll matrix" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption>{caption}</caption>
        <thead>
          <tr>
            <td />
            {Array.from({ length: columns }, (_, n) => (
              <th scope="col" class="number" key={n}>
                {n}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {Array.from({ length: rows }, (_, row) => (
            <tr key={row}>
              <th scope="row">{row}</th>
              {elements.slice(row * numColumns, row * numColumns + columns).map((each, n) => (
                <td class="number" key={n}>
                  {formatNumber(each)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {numColumns > columns && <p class="field-hint">{numColumns - columns} more columns; copy the output to have all.</p>}
      {numRows > numShown && <More onMore={() => show(numShown * 4)} left={numRows - numShown} />}
    </div>
  );
}

function More({ onMore, left }: { onMore: () => void; left: number }) {
  return (
    <Button isSmall onClick={onMore}>
      More ({left} left)
    </Button>
  );
}

function formatNumber(element: Element): string {
  if (typeof element !== "number" || Number.isInteger(element)) return String(element);
  return String(Number(element.toPrecision(6)));
}
