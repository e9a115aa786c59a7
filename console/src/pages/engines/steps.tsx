// The last steps of an engine: how many tokens each computed, and how long it took.
import { useCallback } from "preact/hooks";
import { stepsOf } from "../../live/history";
import type { Engine, Step } from "../../live/sample";
import { isDown } from "../../live/words";
import { Canvas } from "../../ui/canvas";
import { clock, count, milliseconds } from "../../ui/format";
import { color } from "../../ui/theme";

const BAR = 5;
const HEIGHT = 216;
/** Height of the durations under the tokens. */
const DURATIONS = 64;
const LABELS = 14;

export function Steps({ engine }: { engine: Engine }) {
  const steps = stepsOf(engine);
  const last = steps.at(-1);
  const draw = useCallback(
    (context: CanvasRenderingContext2D, width: number) => drawSteps(context, fitting(steps, width), width),
    [steps],
  );
  const describe = (x: number, _: number, width: number) => {
    const shown = fitting(steps, width);
    const step = shown[Math.floor((x - (width - shown.length * BAR)) / BAR)];
    return step ? describeStep(step) : "";
  };
  return (
    <section>
      <h3>Last steps</h3>
      {engine.steps === null && !last ? (
        <p class="soft small">
          {isDown(engine) ? "There are none until the engine serves." : "This runtime does not tell its steps."}
        </p>
      ) : (
        <>
          <div class="legend">
            <span>
              <i class="prefill-mark" /> prefill tokens <b>{count(last?.[2])}</b>
            </span>
            <span>
              <i class="decode-mark" /> decode tokens <b>{count(last?.[3])}</b>
            </span>
            <span>
              <i class="duration-mark" /> duration <b>{milliseconds(last?.[1])}</b>
            </span>
          </div>
          <Canvas label={`The last ${steps.length} steps`} height={() => HEIGHT} draw={draw} describe={describe} />
        </>
      )}
    </section>
  );
}

function fitting(steps: Step[], width: number): Step[] {
  return steps.slice(-Math.floor(width / BAR));
}

function describeStep([at, ms, prefill, decode, sequences]: Step): string {
  return `${clock(at)}: ${count(prefill)} prefill and ${count(decode)} decode tokens of ${count(sequences)} sequences in ${milliseconds(ms)}`;
}

function drawSteps(context: CanvasRenderingContext2D, steps: Step[], width: number): void {
  const tall = HEIGHT - DURATIONS - LABELS;
  const mostTokens = Math.max(1, ...steps.map((each) => each[2] + each[3]));
  const mostMs = Math.max(1, ...steps.map((each) => each[1]));
  const start = width - steps.length * BAR;
  drawScale(context, width, tall, `${count(mostTokens)} tokens`, milliseconds(mostMs));
  steps.forEach(([, ms, prefill, decode], n) => {
    const x = start + n * BAR;
    const decodeTall = (decode / mostTokens) * tall;
    const prefillTall = (prefill / mostTokens) * tall;
    context.fillStyle = color("series-1");
    context.fillRect(x, LABELS + tall - decodeTall, BAR - 1, decodeTall);
    context.fillStyle = color("series-2");
    context.fillRect(x, LABELS + tall - decodeTall - prefillTall, BAR - 1, prefillTall);
    context.fillStyle = color("series-4");
    const msTall = (ms / mostMs) * (DURATIONS - LABELS);
    context.fillRect(x, HEIGHT - msTall, BAR - 1, msTall);
  });
}

function drawScale(context: CanvasRenderingContext2D, width: number, tall: number, tokens: string, ms: string): void {
  context.strokeStyle = color("line");
  context.fillStyle = color("text-soft");
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillText(tokens, 0, 10);
  context.fillText(ms, 0, HEIGHT - DURATIONS + 12);
  context.beginPath();
  for (const y of [LABELS, LABELS + tall, HEIGHT]) {
    context.moveTo(0, y - 0.5);
    context.lineTo(width, y - 0.5);
  }
  context.stroke();
}
