import { signal } from "@preact/signals";
import { useState } from "preact/hooks";
import { needsKey } from "../api/client";
import { apiKey, setKey } from "../api/key";
import * as live from "../live/connection";
import { Button } from "../ui/button";
import { Field } from "../ui/field";
import { Icon } from "../ui/icon";

/** Whether the user wants to give another key. */
export const isKeyAsked = signal(false);

/** Asks for the key. */
export function KeyScreen() {
  const [text, setText] = useState("");
  const isRefused = needsKey.value && apiKey.value !== "";
  const use = (event: Event) => {
    event.preventDefault();
    useKey(text.trim());
  };
  return (
    <form class="key-screen panel" onSubmit={use}>
      <Icon name="key" size={30} />
      <h1>{needsKey.value ? "This server asks for a key" : "Use another key"}</h1>
      <p>The operator's pages need a key with the admin right; the playground needs one that may use the models.</p>
      <Field
        label="API key"
        hint="It is kept in this tab alone, until you close it."
        error={isRefused ? "The server does not know this key, or it has expired." : undefined}
      >
        <input
          type="password"
          autocomplete="off"
          spellcheck={false}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          autofocus
        />
      </Field>
      <div class="row">
        <Button kind="primary" type="submit" disabled={!text.trim()}>
          Continue
        </Button>
        {!needsKey.value && <Button onClick={() => (isKeyAsked.value = false)}>Cancel</Button>}
        {apiKey.value && <Button onClick={() => useKey("")}>Forget the key</Button>}
      </div>
    </form>
  );
}

function useKey(key: string): void {
  setKey(key);
  needsKey.value = false;
  isKeyAsked.value = false;
  if (live.connection.value !== "closed") live.retry();
}

/** Opens the screen that asks for a key. */
export function KeyButton() {
  const label = apiKey.value ? "Change the key" : "Give a key";
  return (
    <Button
      kind="quiet"
      icon="key"
      class={apiKey.value ? "has-key" : ""}
      label={label}
      onClick={() => (isKeyAsked.value = !isKeyAsked.value)}
    />
  );
}
