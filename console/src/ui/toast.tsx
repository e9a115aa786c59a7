import { signal } from "@preact/signals";
import { Button } from "./button";
import { Icon } from "./icon";

export type Tone = "info" | "good" | "warning" | "error";

interface Note {
  id: number;
  text: string;
  tone: Tone;
}

const SHOWN_MS = 6000;
const notes = signal<Note[]>([]);
let lastId = 0;

/** Shows a line for a few seconds. An error stays until it is closed. */
export function toast(text: string, tone: Tone = "info"): void {
  const id = ++lastId;
  notes.value = [...notes.value.filter((each) => each.text !== text).slice(-3), { id, text, tone }];
  if (tone !== "error") setTimeout(() => close(id), SHOWN_MS);
}

function close(id: number): void {
  notes.value = notes.value.filter((each) => each.id !== id);
}

const ICONS = { info: "info", good: "check", warning: "warning", error: "error" } as const;

/** The place where the lines of `toast` stand. The shell has it once. */
export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {notes.value.map((each) => (
        <div class={`toast tone-${each.tone}`} key={each.id}>
          <Icon name={ICONS[each.tone]} />
          <span>{each.text}</span>
          <Button kind="quiet" icon="close" isSmall label="Close" onClick={() => close(each.id)} />
        </div>
      ))}
    </div>
  );
}
