// What the operator's pages show while the server refuses, is away, or has not sent anything yet.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { connection, problem, retry, retryAt, sample } from "../live/connection";
import { Button } from "../ui/button";
import { Empty, Notice } from "../ui/layout";
import { isKeyAsked } from "./key";

/** Shows a page once there is a sample, or says why there is none. */
export function Gate({ children }: { children: ComponentChildren }) {
  if (connection.value === "refused") return <Refused />;
  if (sample.value) return <>{children}</>;
  if (connection.value === "away") return null;
  return (
    <div class="loading" role="status">
      <span class="spinner" /> Connecting to the server
    </div>
  );
}

function Refused() {
  return (
    <Empty icon="key" title="This key may not see the operator's pages">
      <p>{problem.value}</p>
      <div class="row row-center">
        <Button kind="primary" onClick={() => (isKeyAsked.value = true)}>
          Use another key
        </Button>
        <Button onClick={retry}>Try again</Button>
      </div>
    </Empty>
  );
}

/** Says that the server is away, and when the console tries again. What was seen last stays below. */
export function Away() {
  const isAway = connection.value === "away";
  const leftS = useCountdown(isAway);
  if (!isAway) return null;
  return (
    <Notice tone="error">
      <strong>The server is away.</strong> {problem.value} {sample.value && "What you see is its last sample."}{" "}
      <span aria-live="off">{leftS > 0 ? `Trying again in ${leftS} s.` : "Trying again."}</span>{" "}
      <Button isSmall onClick={retry}>
        Try now
      </Button>
    </Notice>
  );
}

function useCountdown(isOn: boolean): number {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!isOn) return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 500);
    return () => clearInterval(timer);
  }, [isOn]);
  return Math.max(0, Math.ceil((retryAt.value - Date.now()) / 1000));
}

const STATES = {
  closed: null,
  connecting: ["info", "Connecting"],
  open: ["good", "Live"],
  away: ["error", "Away"],
  refused: ["warning", "Refused"],
} as const;

/** Whether samples arrive, as a dot with a word. */
export function ConnectionState() {
  const state = STATES[connection.value];
  if (!state) return null;
  return (
    <span class={`connection tone-${state[0]}`} role="status">
      <span class="dot" /> {state[1]}
    </span>
  );
}
