// Server-sent events over fetch: EventSource can send neither a key nor a body.
import { send, type Options } from "./client";

export interface ServerEvent {
  event: string;
  id: string;
  data: string;
}

/** Yields the events of an answer as they come. Breaking out of the loop ends the request. */
export async function* streamEvents(path: string, options: Options = {}): AsyncGenerator<ServerEvent> {
  const abort = new AbortController();
  options.signal?.addEventListener("abort", () => abort.abort(), { once: true });
  if (options.signal?.aborted) abort.abort();
  const headers = { accept: "text/event-stream", ...options.headers };
  try {
    const answer = await send(path, { ...options, headers, signal: abort.signal });
    if (answer.body) yield* readEvents(answer.body);
  } finally {
    abort.abort();
  }
}

/** Yields the events in a stream of bytes. Comments are left out. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const blocks = rest.split(/\r\n\r\n|\n\n|\r\r/);
    rest = done ? "" : (blocks.pop() ?? "");
    for (const block of blocks) {
      const found = parseEvent(block);
      if (found) yield found;
    }
    if (done) return;
  }
}

function parseEvent(block: string): ServerEvent | null {
  const found: ServerEvent = { event: "message", id: "", data: "" };
  const data: string[] = [];
  for (const line of block.split(/\r\n|\n|\r/)) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "event") found.event = value;
    else if (name === "id") found.id = value;
  }
  found.data = data.join("\n");
  return data.length ? found : null;
}
