// Pages by the part of the address after #, so that one file serves all of them under any prefix: #/engines/rill.
import { computed, signal } from "@preact/signals";

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

/** The words of the address: the page's name, then what it is to show. */
export const route = computed(() =>
  hash.value
    .replace(/^#?\/?/, "")
    .split("/")
    .filter(Boolean)
    .map(decodeURIComponent),
);

/** Returns the address of a page, for a link. */
export function linkTo(...words: string[]): string {
  return `#/${words.map(encodeURIComponent).join("/")}`;
}
