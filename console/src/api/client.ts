// Requests to the server that the console came from, with the key of this tab.
import { signal } from "@preact/signals";
import { apiKey } from "./key";

/** The server's root, a proxy's prefix included: the console's own page stands one folder below it. */
const root = new URL("../", document.baseURI);

/** Whether the server has refused a request for want of a right key: then the console asks for one. */
export const needsKey = signal(false);

/** An answer that is an error, in the words of the server; status 0: there was no answer. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly requestId = "",
    readonly code = "",
    /** The field of the request that it is about, where the server names one. */
    readonly param = "",
  ) {
    super(message);
  }
}

export interface Options {
  method?: string;
  /** An object is sent as JSON, anything else as it is. */
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

/** Returns the whole address of a path of the server, such as "/v1/models". */
export function address(path: string): string {
  return new URL(path.replace(/^\//, ""), root).href;
}

/** Sends a request. Throws ApiError for an answer other than 2xx, and where there is none. */
export async function send(path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = { ...options.headers };
  if (apiKey.value) headers.authorization = `Bearer ${apiKey.value}`;
  let body = options.body as BodyInit | undefined;
  if (isPlain(options.body)) {
    headers["content-type"] ??= "application/json";
    body = JSON.stringify(options.body);
  }
  const method = options.method ?? (body === undefined ? "GET" : "POST");
  const answer = await fetch(address(path), { method, headers, body, signal: options.signal }).catch((error: Error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  });
  if (!answer.ok) {
    if (answer.status === 401) needsKey.value = true;
    throw await readError(answer);
  }
  return answer;
}

/** Sends a request and returns the JSON of its answer. */
export async function fetchJson<T>(path: string, options: Options = {}): Promise<T> {
  return (await (await send(path, options)).json()) as T;
}

function isPlain(body: unknown): boolean {
  return Array.isArray(body) || Object.getPrototypeOf(body ?? 0) === Object.prototype;
}

async function readError(answer: Response): Promise<ApiError> {
  const text = await answer.text().catch(() => "");
  return readErrorText(answer.status, text, answer.headers.get("x-request-id") ?? "");
}

/** Returns the error in the body of an answer: OpenAI's object, Triton's text, or neither. */
export function readErrorText(status: number, text: string, requestId: string): ApiError {
  try {
    const { error } = JSON.parse(text) as { error: string | { message: string; code?: string; param?: string | null } };
    if (typeof error === "string") return new ApiError(status, error, requestId);
    return new ApiError(status, error.message, requestId, error.code ?? "", error.param ?? "");
  } catch {
    return new ApiError(status, text.slice(0, 300) || `The server answers ${status}.`, requestId);
  }
}
