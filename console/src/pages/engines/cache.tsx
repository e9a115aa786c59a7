// The KV cache of an engine: how its blocks are shared out, and a cell for each block.
import { useCallback, useMemo } from "preact/hooks";
import type { BlockMap, Blocks as Counts, Engine } from "../../live/sample";
import { isDown } from "../../live/words";
import { Canvas } from "../../ui/canvas";
import { count, percent } from "../../ui/format";
import { color } from "../../ui/theme";

const KINDS = [
  { name: "free", color: "block-free", text: "free" },
  { name: "cached", color: "block-cached", text: "cached: free, with a prefix that may be used again" },
  { name: "owned", color: "block-owned", text: "owned by one sequence" },
  { name: "shared", color: "block-shared", text: "shared by several sequences" },
] as const;
const LARGEST_CELL = 14;
const SMALLEST_CELL = 4;
const GAP = 1;
/** Height that the cells may fill, in CSS pixels. */
const HEIGHT = 190;

export function Cache({ engine }: { engine: Engine }) {
  return (
    <section>
      <h3>KV cache</h3>
      <Blocks engine={engine} />
    </section>
  );
}

function Blocks({ engine }: { engine: Engine }) {
  const { blocks, block_map: map } = engine;
  if (isDown(engine)) return <p class="soft small">It is empty until the engine serves.</p>;
  if (!blocks?.total) return <p class="soft small">This runtime does not tell its blocks.</p>;
  return (
    <>
      <Shares blocks={blocks} />
      {map ? <Map map={map} blocks={blocks} /> : <p class="soft small">This runtime has no map of single blocks.</p>}
    </>
  );
}

function Shares({ blocks }: { blocks: Counts }) {
  const shared = blocks.shared ?? 0;
  const cached = blocks.cached ?? 0;
  const sizes = { shared, owned: blocks.used - shared, cached, free: blocks.free - cached };
  const reserved = blocks.reserved / blocks.total;
  const order = [...KINDS].reverse();
  return (
    <div class="shares">
      <div
        class="shares-bar"
        role="img"
        aria-label={`${order.map((each) => `${count(sizes[each.name])} ${each.name}`).join(", ")}, ${count(blocks.reserved)} reserved`}
      >
        {order.map((each) => (
          <span
            key={each.name}
            style={{ width: `${(100 * sizes[each.name]) / blocks.total}%`, background: `var(--${each.color})` }}
          />
        ))}
        <i class="shares-reserved" style={{ left: `${Math.min(100, 100 * reserved)}%` }} />
      </div>
      <div class="legend">
        {order.map((each) => (
          <span key={each.name}>
            <i style={{ background: `var(--${each.color})` }} /> {each.name} <b>{count(sizes[each.name])}</b>
          </span>
        ))}
        <span>
          <i class="reserved-mark" /> reserved <b>{count(blocks.reserved)}</b> ({percent(reserved)})
        </span>
      </div>
      <p class="soft small">
        {count(blocks.total)} blocks of {count(blocks.size)} tokens
      </p>
    </div>
  );
}

function Map({ map, blocks }: { map: BlockMap; blocks: Counts }) {
  const cells = useMemo(() => decode(map.cells), [map.cells]);
  const draw = useCallback(
    (context: CanvasRenderingContext2D, width: number) => drawCells(context, cells, width),
    [cells],
  );
  const describe = (x: number, y: number, width: number) => {
    const size = chooseSize(cells.length, width);
    const at = Math.floor(y / size) * Math.floor(width / size) + Math.floor(x / size);
    const kind = KINDS[cells[at] ?? -1];
    const first = at * map.blocks_per_cell;
    const last = Math.min(first + map.blocks_per_cell, blocks.total) - 1;
    const name = first === last ? `Block ${first}` : `Most of blocks ${first} to ${last}`;
    return kind && x < Math.floor(width / size) * size ? `${name}: ${kind.text}` : "";
  };
  return (
    <Canvas
      label={`Map of ${count(cells.length)} cells, one for ${map.blocks_per_cell === 1 ? "each block" : `${map.blocks_per_cell} blocks`}`}
      height={(width) => rowsOf(cells.length, width) * chooseSize(cells.length, width)}
      draw={draw}
      describe={describe}
    />
  );
}

function decode(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
}

/** Returns the side of a cell with its gap: as large as all of them fit into the height. */
function chooseSize(num: number, width: number): number {
  for (let size = LARGEST_CELL; size > SMALLEST_CELL; size--) {
    if (Math.ceil(num / Math.floor(width / size)) * size <= HEIGHT) return size;
  }
  return SMALLEST_CELL;
}

function rowsOf(num: number, width: number): number {
  return Math.ceil(num / Math.floor(width / chooseSize(num, width)));
}

function drawCells(context: CanvasRenderingContext2D, cells: Uint8Array, width: number): void {
  const size = chooseSize(cells.length, width);
  const perRow = Math.floor(width / size);
  KINDS.forEach(({ color: name }, kind) => {
    context.fillStyle = color(name);
    cells.forEach((cell, n) => {
      if (cell === kind) context.fillRect((n % perRow) * size, Math.floor(n / perRow) * size, size - GAP, size - GAP);
    });
  });
}
