// The KV cache of an engine: how its blocks are shared out.
import type { Blocks as Counts, Engine } from "../../live/sample";
import { isDown } from "../../live/words";
import { count, percent } from "../../ui/format";
import { BlockPicture } from "./block_picture";

const KINDS = ["shared", "owned", "reserved", "cached", "free"] as const;

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
      {map ? <BlockPicture map={map} total={blocks.total} /> : <p class="soft small">This runtime has no map of single blocks.</p>}
    </>
  );
}

function Shares({ blocks }: { blocks: Counts }) {
  const shared = blocks.shared ?? 0;
  const reserved = Math.min(Math.max(0, blocks.reserved - blocks.used), blocks.free);
  // Empty blocks are handed out before cached ones, so the reserved ones are taken of those first.
  const empty = blocks.free - (blocks.cached ?? 0);
  const free = Math.max(0, empty - reserved);
  const sizes = { shared, owned: blocks.used - shared, reserved, cached: blocks.free - reserved - free, free };
  return (
    <div class="shares">
      <div class="shares-bar" role="img" aria-label={KINDS.map((each) => `${count(sizes[each])} ${each}`).join(", ")}>
        {KINDS.map((each) => (
          <span
            key={each}
            style={{ width: `${(100 * sizes[each]) / blocks.total}%`, background: `var(--block-${each})` }}
          />
        ))}
      </div>
      <div class="legend">
        {KINDS.map((each) => (
          <span key={each}>
            <i style={{ background: `var(--block-${each})` }} /> {each} <b>{count(sizes[each])}</b>
          </span>
        ))}
      </div>
      <p class="soft small">
        {count(blocks.total)} blocks of {count(blocks.size)} tokens, {percent(blocks.reserved / blocks.total)} promised
        to the sequences that run
      </p>
    </div>
  );
}
