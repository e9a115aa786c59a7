// The one stream of samples that all pages of the operator read. It is open while such a page is shown.
import { signal } from "@preact/signals";
import { ApiError } from "../api/client";
import { streamEvents } from "../api/sse";
import { record } from "./history";
import type { Sample } from "./sample";

export type Connection = "closed" | "connecting" | "open" | "away" | "refused";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
/** Silence after which the connection counts as lost, in intervals of the samples. */
const SILENT_INTERVALS = 8;

/** The newest sample; null before the first. It stays while the server is away. */
export const sample = signal<Sample | null>(null);
export const connection = signal<Connection>("closed");
/** Why the server refused, or does not answer. */
export const problem = signal("");
/** When the console tries again to reach a server that is away, in milliseconds of Date.now(). */
export const retryAt = signal(0);

let running: AbortController | null = null;
let wake = () => {};

/** Opens the stream, and keeps it open until `close`. */
export function open(): void {
  if (running) return;
  running = new AbortController();
  void keepOpen(running.signal);
}

export function close(): void {
  running?.abort();
  running = null;
  wake();
  connection.value = "closed";
}

/** Tries again now, with the key of now. */
export function retry(): void {
  close();
  open();
}

async function keepOpen(signal: AbortSignal): Promise<void> {
  let waitMs = FIRST_WAIT_MS;
  while (!signal.aborted) {
    if (connection.value !== "away") connection.value = "connecting";
    const { isSeen, isRefused } = await readSamples(signal);
    if (signal.aborted) return;
    if (isRefused) {
      connection.value = "refused";
      return;
    }
    waitMs = isSeen ? FIRST_WAIT_MS : Math.min(waitMs * 2, LONGEST_WAIT_MS);
    connection.value = "away";
    retryAt.value = Date.now() + waitMs;
    await pause(waitMs);
  }
}

/** Reads samples until the stream ends. Returns whether there was any, and whether the server refuses them. */
async function readSamples(outer: AbortSignal): Promise<{ isSeen: boolean; isRefused: boolean }> {
  const abort = new AbortController();
  outer.addEventListener("abort", () => abort.abort(), { once: true });
  let isSeen = false;
  let isRefused = false;
  let timer = 0;
  const watch = (intervalS: number) => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), Math.max(10, intervalS * SILENT_INTERVALS) * 1000);
  };
  try {
    watch(1);
    for await (const event of streamEvents("/v1/admin/live?interval_secs=1", { signal: abort.signal })) {
      if (event.event !== "sample") continue;
      const next = JSON.parse(event.data) as Sample;
      isSeen = true;
      watch(next.interval_s);
      record(next);
      sample.value = next;
      connection.value = "open";
      problem.value = "";
    }
    problem.value = "The server has closed the connection.";
  } catch (error) {
    problem.value = error instanceof ApiError ? error.message : "The connection to the server is lost.";
    isRefused = error instanceof ApiError && [401, 403, 404].includes(error.status);
  } finally {
    clearTimeout(timer);
  }
  return { isSeen, isRefused };
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}
