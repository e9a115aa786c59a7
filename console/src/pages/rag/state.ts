// Which collection is shown, and what it holds. It stays while other pages are shown.
import { computed, signal } from "@preact/signals";
import { ApiError } from "../../api/client";
import { readFailure, type Failure } from "../../playground/failure";
import { toast } from "../../ui/toast";
import { findPlace } from "../../playground/place";
import * as api from "./api";
import type { RagPlace } from "./snippets";

/** The collections; null while they are being asked for. */
export const collections = signal<api.Collection[] | null>(null);
export const chosen = signal("");
export const documents = signal<api.DocumentInfo[]>([]);
export const hasMore = signal(false);
export const failure = signal<Failure | null>(null);
export const collection = computed(() => collections.value?.find((each) => each.name === chosen.value) ?? null);

/** Asks the server for its collections, and for the documents of the chosen one. */
export async function refresh(): Promise<void> {
  await reporting(async () => {
    const found = await api.listCollections();
    if (!found.some((each) => each.name === chosen.value)) chosen.value = found[0]?.name ?? "";
    collections.value = found;
    failure.value = null;
    if (chosen.value) await loadDocuments();
    else documents.value = [];
  });
}

/** Shows another collection. */
export async function choose(name: string): Promise<void> {
  chosen.value = name;
  documents.value = [];
  await reporting(loadDocuments);
}

/** Loads the documents from the first on, as many as are shown, so that a list that was read on does not fall back. */
async function loadDocuments(): Promise<void> {
  const name = chosen.value;
  const found = await api.listDocuments(name, "");
  if (name !== chosen.value) return;
  documents.value = found.data;
  hasMore.value = found.has_more;
  failure.value = null;
}

/** Loads the next page of documents. */
export async function loadMore(): Promise<void> {
  await reporting(async () => {
    const found = await api.listDocuments(chosen.value, documents.value.at(-1)?.id ?? "");
    documents.value = [...documents.value, ...found.data];
    hasMore.value = found.has_more;
  });
}

/** Creates a collection and shows it. Returns whether the server took it. */
export async function create(name: string, key: string): Promise<boolean> {
  return reporting(async () => {
    await api.createCollection(name, key);
    chosen.value = name;
    await refresh();
  });
}

export async function removeCollection(): Promise<void> {
  await reporting(async () => {
    await api.deleteCollection(chosen.value);
    toast(`Collection ${chosen.value} is deleted.`, "good");
    await refresh();
  });
}

export async function removeDocument(id: string): Promise<void> {
  await reporting(async () => {
    await api.deleteDocument(chosen.value, id);
    toast(`${id} is deleted.`, "good");
    await refresh();
  });
}

/** Returns where copied code finds the collection. */
export function ragPlace(): RagPlace {
  return { ...findPlace(), collection: chosen.value, hasOwner: Boolean(api.ownerKey(chosen.value)) };
}

async function reporting(work: () => Promise<void>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    failure.value = readFailure(error);
    return false;
  }
}
