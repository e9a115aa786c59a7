// The server's collections and documents.
import { signal } from "@preact/signals";
import { fetchJson } from "../../api/client";

export interface Collection {
  name: string;
  encoder: string;
  num_documents: number;
  num_chunks: number;
  is_protected: boolean;
}

export interface DocumentInfo {
  id: string;
  title: string;
  format: string;
  num_chars: number;
  num_chunks: number;
}

export interface DocumentPage {
  data: DocumentInfo[];
  has_more: boolean;
}

/** The owner keys of protected collections, for as long as the page is open. */
const ownerKeys = signal<Record<string, string>>({});
const KEY_HEADER = "x-sluice-collection-key";
const PAGE_SIZE = 100;

export function ownerKey(collection: string): string {
  return ownerKeys.value[collection] ?? "";
}

export function setOwnerKey(collection: string, key: string): void {
  ownerKeys.value = { ...ownerKeys.value, [collection]: key };
}

/** Returns the headers of requests to a collection. */
export function keyHeaders(collection: string): Record<string, string> {
  const key = ownerKey(collection);
  return key ? { [KEY_HEADER]: key } : {};
}

/** Returns the path of something in a collection. The words of a document's id may be parted by slashes. */
export function pathOf(collection: string, rest: string, id = ""): string {
  const words = id.split("/").map(encodeURIComponent).join("/");
  return `/v1/rag/${encodeURIComponent(collection)}/${rest}${id && `/${words}`}`;
}

export async function listCollections(): Promise<Collection[]> {
  return (await fetchJson<{ data: Collection[] }>("/v1/rag/collections")).data;
}

/** Creates a collection; with a key it belongs to whoever has it. */
export async function createCollection(name: string, key: string): Promise<void> {
  await fetchJson("/v1/rag/collections", { body: { name }, headers: key ? { [KEY_HEADER]: key } : {} });
  if (key) setOwnerKey(name, key);
}

export async function deleteCollection(name: string): Promise<void> {
  const path = `/v1/rag/collections/${encodeURIComponent(name)}`;
  await fetchJson(path, { method: "DELETE", headers: keyHeaders(name) });
}

/** Returns the documents whose ids come after one. */
export async function listDocuments(collection: string, after: string): Promise<DocumentPage> {
  const path = `${pathOf(collection, "documents")}?limit=${PAGE_SIZE}&after=${encodeURIComponent(after)}`;
  return fetchJson<DocumentPage>(path, { headers: keyHeaders(collection) });
}

export async function deleteDocument(collection: string, id: string): Promise<void> {
  await fetchJson(pathOf(collection, "documents", id), { method: "DELETE", headers: keyHeaders(collection) });
}

/** Returns a document's text, in which the offsets of sources count. */
export async function fetchText(collection: string, id: string): Promise<string> {
  const found = await fetchJson<{ text: string }>(pathOf(collection, "documents", id), { headers: keyHeaders(collection) });
  return found.text;
}
