// A cell for each block of a KV cache, in the colour of the sequence that has it.
import { useCallback, useMemo, useState } from "preact/hooks";
import { sequenceColor } from "../../live/colors";
import type { BlockMap, Holder } from "../../live/sample";
import { linkTo } from "../../router";
import { Canvas } from "../../ui/canvas";
import { count } from "../../ui/format";
import { color, isDark } from "../../ui/theme";

/** As in a map's cells. */
const STATES = ["free", "cached", "owned", "shared"] as const;
const OTHER = 254;
const RESERVED = 255;
const LARGEST_CELL = 14;
const SMALLEST_CELL = 4;
const GAP = 1;
/** Height that the cells may fill, in CSS pixels. */
const HEIGHT = 190;
const MOST_NAMED = 8;

interface Cells {
  states: Uint8Array;
  owners: Uint8Array;
  holders: Holder[];
}

/** The map of a cache of `total` blocks. A click on a cell or on a name shows the blocks of that request alone. */
export function BlockPicture({ map, total }: { map: BlockMap; total: number }) {
  const [picked, setPicked] = useState("");
  const cells = useMemo(() => decodeMap(map), [map.cells, map.owners, map.holders]);
  const num = cells.states.length;
  const dark = isDark();
  const draw = useCallback(
    (context: CanvasRenderingContext2D, width: number) => drawCells(context, cells, width, picked),
    [cells, picked, dark],
  );
  const describe = (x: number, y: number, width: number) => {
    const at = cellAt(num, x, y, width);
    if (at === null) return "";
    const first = at * map.blocks_per_cell;
    const last = Math.min(first + map.blocks_per_cell, total) - 1;
    return `${first === last ? `Block ${first}` : `Most of blocks ${first} to ${last}`}: ${describeCell(cells, at)}`;
  };
  const pick = (x: number, y: number, width: number) => {
    const at = cellAt(num, x, y, width);
    const found = at === null ? undefined : holderOf(cells, at);
    setPicked(found && found[0] !== picked ? found[0] : "");
  };
  return (
    <>
      <Canvas
        label={`Map of ${count(num)} cells, one for ${map.blocks_per_cell === 1 ? "each block" : `${map.blocks_per_cell} blocks`}, by sequence`}
        height={(width) => rowsOf(num, width) * chooseSize(num, width)}
        draw={draw}
        describe={describe}
        onPick={pick}
      />
      <Holders holders={map.holders} picked={picked} onPick={setPicked} />
    </>
  );
}

function Holders({ holders, picked, onPick }: { holders: Holder[]; picked: string; onPick: (id: string) => void }) {
  const shown = holders.slice(0, MOST_NAMED);
  const found = holders.find(([id]) => id === picked);
  if (found && !shown.includes(found)) shown.push(found);
  return (
    <>
      <div class="holders" role="group" aria-label="Sequences by their blocks">
        {shown.map(([id, num, most], n) => (
          <button
            type="button"
            key={`${id} ${n}`}
            title={`${id}: ${describeHolder(num, most)}`}
            aria-pressed={id === picked}
            onClick={() => onPick(id === picked ? "" : id)}
          >
            <i style={{ background: sequenceColor(id) }} /> <span class="mono">{id.slice(-8)}</span> {count(num)}
          </button>
        ))}
        {holders.length > shown.length && <span class="soft small">{holders.length - shown.length} more</span>}
      </div>
      {picked && (
        <p class="small">
          <span class="mono">{picked}</span>{" "}
          {found ? `has ${describeHolder(found[1], found[2])}` : "has no blocks any more"}.{" "}
          <a href={linkTo("timelines", picked)}>Its timeline</a>
        </p>
      )}
    </>
  );
}

function describeHolder(num: number, most: number): string {
  return `${count(num)} ${num === 1 ? "block" : "blocks"}, at most ${count(most)}`;
}

function decodeMap({ cells, owners, holders }: BlockMap): Cells {
  return { states: decode(cells), owners: decode(owners), holders };
}

function decode(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
}

function holderOf({ owners, holders }: Cells, at: number): Holder | undefined {
  return holders[(owners[at] ?? 0) - 1];
}

function describeCell(cells: Cells, at: number): string {
  const holder = holderOf(cells, at);
  const name = holder ? holder[0] : "a sequence with few blocks";
  const reserved = cells.owners[at] === RESERVED ? ", and promised to a sequence that runs" : "";
  switch (STATES[cells.states[at] ?? 0]) {
    case "owned":
      return holder ? `owned by ${name}, which has ${describeHolder(holder[1], holder[2])}` : `owned by ${name}`;
    case "shared":
      return `shared by several sequences, one is ${name}`;
    case "cached":
      return `cached: free, with a prefix that may be used again${reserved}`;
    default:
      return `free${reserved}`;
  }
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

function cellAt(num: number, x: number, y: number, width: number): number | null {
  const size = chooseSize(num, width);
  const perRow = Math.floor(width / size);
  const at = Math.floor(y / size) * perRow + Math.floor(x / size);
  return x < perRow * size && at >= 0 && at < num ? at : null;
}

/** Draws the cells; where a request is picked, all others faintly. */
function drawCells(context: CanvasRenderingContext2D, cells: Cells, width: number, picked: string): void {
  const num = cells.states.length;
  const size = chooseSize(num, width);
  const perRow = Math.floor(width / size);
  const paints = choosePaints(cells.holders);
  const isFaint = cells.holders.map(([id]) => picked !== "" && id !== picked);
  for (let n = 0; n < num; n++) {
    const owner = cells.owners[n] ?? 0;
    context.fillStyle = paints(cells.states[n] ?? 0, owner);
    context.globalAlpha = picked && (isFaint[owner - 1] ?? true) ? 0.3 : 1;
    context.fillRect((n % perRow) * size, Math.floor(n / perRow) * size, size - GAP, size - GAP);
  }
}

/** Returns what gives the colour of a cell by its state and owner. */
function choosePaints(holders: Holder[]): (state: number, owner: number) => string {
  const states = STATES.map((each) => color(`block-${each}`));
  const reserved = color("block-reserved");
  const sequences = holders.map(([id]) => sequenceColor(id));
  return (state, owner) => {
    const plain = states[state] ?? "";
    if (owner === RESERVED) return reserved;
    return STATES[state] === "owned" && owner !== OTHER ? (sequences[owner - 1] ?? plain) : plain;
  };
}
