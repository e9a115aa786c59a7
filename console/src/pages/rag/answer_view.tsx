import { useRef, useState } from "preact/hooks";
import { FailureNotice } from "../../playground/failure";
import { Badge, Notice } from "../../ui/layout";
import { splitAnswer, type Piece, type Source } from "./citations";
import { openDocument } from "./document_view";
import type { RagAnswer } from "./question";

/** A question, its answer with citations, and the sources. Pointing at a citation marks its source, and back. */
export function AnswerView({ answer }: { answer: RagAnswer }) {
  const [marked, mark] = useState<number[]>([]);
  const list = useRef<HTMLOListElement>(null);
  const show = (id: number) => {
    mark([id]);
    const card = list.current?.querySelector<HTMLElement>(`[data-source="${id}"]`);
    card?.scrollIntoView({ block: "nearest", behavior: "smooth" });
    card?.focus({ preventScroll: true });
  };
  const isOpen = answer.state === "searching" || answer.state === "streaming";
  return (
    <article class="message message-answer" aria-label={`Answer to ${answer.question}`} aria-busy={isOpen}>
      <h3 class="rag-question">{answer.question}</h3>
      {answer.state === "searching" && <p class="waiting">Searching …</p>}
      <p class="message-text">
        {splitAnswer(answer.text, answer.citations).map((piece, n) => (
          <PieceView key={n} piece={piece} marked={marked} onPoint={mark} onShow={show} />
        ))}
      </p>
      {answer.encoding && <EncodingNotice answer={answer} />}
      {answer.failure && <FailureNotice failure={answer.failure} />}
      {answer.sources.length > 0 && (
        <ol class="sources" ref={list} aria-label="Sources">
          {answer.sources.map((each) => (
            <SourceView key={each.id} source={each} answer={answer} isMarked={marked.includes(each.id)} onPoint={mark} />
          ))}
        </ol>
      )}
      {answer.dropped.length > 0 && <p class="field-hint">{answer.dropped.length} more were found and left out of the prompt.</p>}
      {!isOpen && <Summary answer={answer} />}
    </article>
  );
}

interface PieceProps {
  piece: Piece;
  marked: number[];
  onPoint: (ids: number[]) => void;
  onShow: (id: number) => void;
}

function PieceView({ piece, marked, onPoint, onShow }: PieceProps) {
  if (!piece.sources.length) return <>{piece.text}</>;
  const isMarked = piece.sources.some((each) => marked.includes(each));
  return (
    <span class={`cited ${isMarked ? "cited-marked" : ""}`} onMouseEnter={() => onPoint(piece.sources)} onMouseLeave={() => onPoint([])}>
      {piece.text}
      {piece.sources.map((id) => (
        <button type="button" class="citation" key={id} aria-label={`Source ${id}`} onClick={() => onShow(id)} onFocus={() => onPoint([id])}>
          {id}
        </button>
      ))}
    </span>
  );
}

interface SourceProps {
  source: Source;
  answer: RagAnswer;
  isMarked: boolean;
  onPoint: (ids: number[]) => void;
}

function SourceView({ source, answer, isMarked, onPoint }: SourceProps) {
  const isCited = answer.citations.some((each) => each.source === source.id);
  return (
    <li
      class={`source ${isMarked ? "source-marked" : ""}`}
      data-source={source.id}
      tabIndex={-1}
      onMouseEnter={() => onPoint([source.id])}
      onMouseLeave={() => onPoint([])}
    >
      <div class="row">
        <strong>
          [{source.id}] {source.title || source.document}
        </strong>
        {isCited && <Badge tone="good">cited</Badge>}
        <span class="field-hint">score {source.score.toFixed(3)}</span>
      </div>
      <p class="field-hint">
        {source.document}
        {source.heading && ` › ${source.heading}`}
      </p>
      <details open={isMarked && isCited}>
        <summary>The chunk, characters {source.start} to {source.end}</summary>
        <pre class="chunk" tabIndex={0} aria-label={`Chunk of ${source.document}`}>
          {source.text}
        </pre>
        <button type="button" class="link" onClick={() => void openDocument(answer.collection, source)}>
          Show it in the document
        </button>
      </details>
    </li>
  );
}

function EncodingNotice({ answer }: { answer: RagAnswer }) {
  const { num_encoded: numEncoded, num_chunks: numChunks } = answer.encoding ?? { num_encoded: 0, num_chunks: 0 };
  return (
    <Notice tone="warning">
      Documents are still being encoded: {numEncoded} of {numChunks} chunks. An answer may miss some.
      <progress max={numChunks} value={numEncoded} aria-label="Chunks encoded" />
    </Notice>
  );
}

function Summary({ answer }: { answer: RagAnswer }) {
  const { usage } = answer;
  return (
    <footer class="message-summary">
      {answer.state === "stopped" && <Badge tone="warning">stopped</Badge>}
      {answer.state === "failed" && <Badge tone="error">failed</Badge>}
      {answer.finish && <Badge tone="plain">{answer.finish}</Badge>}
      {usage && (
        <span>
          {usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens
        </span>
      )}
      {answer.foundAt > 0 && <span>sources after {Math.round(answer.foundAt - answer.askedAt)} ms</span>}
      {answer.firstAt > 0 && <span>TTFT {Math.round(answer.firstAt - answer.askedAt)} ms</span>}
      <span>{((answer.endedAt - answer.askedAt) / 1000).toFixed(2)} s</span>
    </footer>
  );
}
