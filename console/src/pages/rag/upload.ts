// Uploads of files, each with its progress. XMLHttpRequest says how much has been sent; fetch does not.
import { signal } from "@preact/signals";
import { address, ApiError, readErrorText } from "../../api/client";
import { apiKey } from "../../api/key";
import { readFailure, type Failure } from "../../playground/failure";
import { keyHeaders, pathOf } from "./api";

export type UploadState = "waiting" | "sending" | "encoding" | "created" | "updated" | "unchanged" | "failed";

export interface Upload {
  id: number;
  name: string;
  state: UploadState;
  /** The share of the file that has been sent, from 0 to 1. */
  sent: number;
  failure: Failure | null;
  /** What came of a file of several documents. */
  note: string;
}

export const uploads = signal<Upload[]>([]);

const AT_ONCE = 3;
let lastId = 0;

/** The server knows other formats by the name and the content. */
const TYPES: Record<string, string> = {
  md: "text/markdown",
  markdown: "text/markdown",
  html: "text/html",
  htm: "text/html",
  pdf: "application/pdf",
  txt: "text/plain",
  jsonl: "application/x-ndjson",
  ndjson: "application/x-ndjson",
};
export const ENDINGS = Object.keys(TYPES).map((each) => `.${each}`);

/** Returns the content type that a file is sent with. */
export function typeOf(name: string): string {
  return TYPES[name.split(".").pop()?.toLowerCase() ?? ""] ?? "application/octet-stream";
}

/** Adds files to a collection, a few at a time. `onStored` is called after each that the server took. */
export async function uploadAll(collection: string, files: File[], onStored: () => void): Promise<void> {
  const waiting = files.map((file) => ({ file, id: ++lastId }));
  const begun = waiting.map(({ file, id }) => ({ id, name: file.name, state: "waiting", sent: 0, failure: null, note: "" }) as const);
  uploads.value = [...begun, ...uploads.value.filter(isOpen)];
  const work = async () => {
    for (let next = waiting.shift(); next; next = waiting.shift()) {
      const { file, id } = next;
      try {
        update(id, await upload(collection, file, id));
        onStored();
      } catch (error) {
        update(id, { state: "failed", failure: readFailure(error) });
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
}

export function isOpen(each: Upload): boolean {
  return each.state === "waiting" || each.state === "sending" || each.state === "encoding";
}

function update(id: number, change: Partial<Upload>): void {
  uploads.value = uploads.value.map((each) => (each.id === id ? { ...each, ...change } : each));
}

interface Outcome {
  status: "created" | "updated" | "unchanged" | "failed";
  error?: { message: string; param?: string | null; code?: string };
}

async function upload(collection: string, file: File, id: number): Promise<Partial<Upload>> {
  update(id, { state: "sending" });
  const path = `${pathOf(collection, "documents")}?id=${encodeURIComponent(file.name)}`;
  const headers = { "content-type": typeOf(file.name), ...keyHeaders(collection) };
  const { data } = await post<{ data: Outcome[] }>(path, headers, file, (sent) => {
    update(id, { sent, state: sent < 1 ? "sending" : "encoding" });
  });
  return summarize(data);
}

/** A file of JSON lines holds several documents, of which some may have failed. */
function summarize(outcomes: Outcome[]): Partial<Upload> {
  const failed = outcomes.filter((each) => each.status === "failed");
  const taken = outcomes.find((each) => each.status !== "failed");
  const note = outcomes.length > 1 ? `${outcomes.length - failed.length} of ${outcomes.length} documents` : "";
  const error = failed[0]?.error;
  const failure = error ? { message: error.message, field: error.param ?? "", code: error.code ?? "" } : null;
  return { state: taken?.status ?? "failed", note, failure, sent: 1 };
}

function post<T>(path: string, headers: Record<string, string>, body: File, onSent: (share: number) => void): Promise<T> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(path));
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    if (apiKey.value) request.setRequestHeader("authorization", `Bearer ${apiKey.value}`);
    request.upload.onprogress = (event) => event.lengthComputable && onSent(event.loaded / event.total);
    request.upload.onload = () => onSent(1);
    request.onerror = () => reject(new ApiError(0, "The server does not answer."));
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText) as T);
      else reject(readErrorText(request.status, request.responseText, request.getResponseHeader("x-request-id") ?? ""));
    };
    request.send(body);
  });
}
