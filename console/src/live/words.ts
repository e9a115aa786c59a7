// States as the pages show them.
import type { Tone } from "../ui/toast";
import type { Alert, Engine, EngineState, ModelState, Sample } from "./sample";

export const ENGINE_TONES: Record<EngineState, Tone | "plain"> = {
  serving: "good",
  loading: "info",
  restarting: "warning",
  silent: "warning",
  draining: "info",
  sleeping: "plain",
  failed: "error",
};

export const MODEL_TONES: Record<ModelState, Tone | "plain"> = {
  READY: "good",
  LOADING: "info",
  UNLOADING: "info",
  UNAVAILABLE: "plain",
  "": "plain",
};

export const SERVER_TONES: Record<Sample["server"]["state"], Tone> = {
  ready: "good",
  loading: "info",
  unready: "error",
  draining: "warning",
};

export const ALERT_TONES: Record<Alert["level"], Tone> = { fail: "error", warn: "warning", note: "info" };

export const LOG_TONES: Record<string, Tone> = { WARNING: "warning", ERROR: "error", CRITICAL: "error" };

/** Whether there is no engine that computes, or will in a moment. */
export function isDown(engine: Engine): boolean {
  return ["restarting", "failed", "loading"].includes(engine.state);
}

/** Returns what tells an engine from the others, such as "rill", or "rill v2 · b" where that is needed. */
export function nameEngine(engine: { model: string; version: string; replica: string }, engines: Engine[]): string {
  const others = engines.filter((each) => each.model === engine.model);
  const hasVersions = others.some((each) => each.version !== engine.version);
  return `${engine.model}${hasVersions ? ` v${engine.version}` : ""}${engine.replica ? ` · ${engine.replica}` : ""}`;
}
