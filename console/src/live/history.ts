// What the console has seen since it was opened, for the time series: the server keeps none of it.
import { signal } from "@preact/signals";
import type { Sample, Step } from "./sample";

/** Most samples and most steps of an engine that are kept. */
const MOST_SAMPLES = 300;
const MOST_STEPS = 240;

export const SERIES = ["time", "generated", "prompt", "cached", "running", "waiting", "ttft50", "ttft99", "itl50", "itl99"] as const;

export type SeriesName = (typeof SERIES)[number];

const columns = Object.fromEntries(SERIES.map((name) => [name, [] as (number | null)[]])) as Record<
  SeriesName,
  (number | null)[]
>;
const steps = new Map<string, Step[]>();

/** Counts the samples. Whoever reads it is drawn again with each. */
export const numRecorded = signal(0);

/** Returns some columns, the time first, as uPlot takes them. */
export function seriesOf(...names: SeriesName[]): (number | null)[][] {
  return ["time" as const, ...names].map((name) => columns[name]);
}

/** Returns the last steps of an engine, oldest first. */
export function stepsOf(engine: { model: string; version: string; replica: string }): Step[] {
  return steps.get(engineKey(engine)) ?? [];
}

export function engineKey(engine: { model: string; version: string; replica: string }): string {
  return [engine.model, engine.version, engine.replica].join("/");
}

/** Adds a sample. After a gap there is a hole, so that no line is drawn across it. */
export function record(sample: Sample): void {
  const last = columns.time.at(-1);
  if (last != null && sample.time - last > 3 * Math.max(1, sample.interval_s)) push(last + 0.001, {});
  const { throughput, latency } = sample;
  push(sample.time, {
    generated: throughput.generated_tokens_per_s,
    prompt: throughput.prompt_tokens_per_s,
    cached: throughput.cached_tokens_per_s,
    running: throughput.running,
    waiting: throughput.waiting,
    ttft50: latency.ttft_ms.p50,
    ttft99: latency.ttft_ms.p99,
    itl50: latency.itl_ms.p50,
    itl99: latency.itl_ms.p99,
  });
  for (const engine of sample.engines) {
    if (!engine.steps) continue;
    steps.set(engineKey(engine), [...stepsOf(engine), ...engine.steps].slice(-MOST_STEPS));
  }
  numRecorded.value += 1;
}

function push(time: number, values: Partial<Record<SeriesName, number | null>>): void {
  for (const name of SERIES) {
    const column = columns[name];
    column.push(name === "time" ? time : (values[name] ?? null));
    if (column.length > MOST_SAMPLES) column.shift();
  }
}
