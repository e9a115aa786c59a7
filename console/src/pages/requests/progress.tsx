import { sequenceColor } from "../../live/colors";
import type { Sequence } from "../../live/sample";
import { count } from "../../ui/format";
import { Meter } from "../../ui/layout";

/** How far a sequence is, of the tokens that it may have at most; bare: without saying which sequence. */
export function Progress({ sequence, isBare }: { sequence: Sequence; isBare?: boolean }) {
  const share = sequence.max_tokens ? sequence.generated_tokens / sequence.max_tokens : 0;
  return (
    <div class="progress">
      <div class="progress-line">
        <span class="soft" title={sequence.request_id}>
          {!isBare && (
            <>
              <i class="swatch" style={{ background: sequenceColor(sequence.request_id) }} />{" "}
              <span class="mono">{sequence.request_id.slice(-8)}</span> {sequence.tenant}
            </>
          )}
        </span>
        <span class="nowrap">
          {count(sequence.generated_tokens)} <span class="soft">of {count(sequence.max_tokens)}</span>
        </span>
      </div>
      <Meter label={`Tokens of ${sequence.request_id}`} share={share} />
    </div>
  );
}
