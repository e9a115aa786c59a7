import { signal } from "@preact/signals";

const NAME = "sluice.key";

/** The API key, kept for this tab alone; "" where there is none. */
export const apiKey = signal(sessionStorage.getItem(NAME) ?? "");

/** Uses another key from the next request on; "" forgets it. */
export function setKey(key: string): void {
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
  apiKey.value = key;
}
