// Questions to a collection, and their answers as they stream.
import { signal } from "@preact/signals";
import { streamEvents } from "../../api/sse";
import { readFailure, type Failure } from "../../playground/failure";
import { parseObject } from "../../playground/json";
import { keyHeaders, pathOf } from "./api";
import type { Citation, Source } from "./citations";

export interface Options {
  topK: string;
  mode: "" | "vector" | "bm25" | "hybrid";
  /** JSON: conditions on the documents' metadata. */
  filter: string;
  maxTokens: string;
  model: string;
}

export interface Encoding {
  num_encoded: number;
  num_chunks: number;
}

export interface RagAnswer {
  id: number;
  collection: string;
  question: string;
  state: "searching" | "streaming" | "done" | "stopped" | "failed";
  sources: Source[];
  dropped: Source[];
  text: string;
  citations: Citation[];
  encoding: Encoding | null;
  finish: string;
  usage: { prompt_tokens: number; completion_tokens: number } | null;
  failure: Failure | null;
  askedAt: number;
  foundAt: number;
  firstAt: number;
  endedAt: number;
}

export const options = signal<Options>({ topK: "", mode: "", filter: "", maxTokens: "200", model: "" });
/** The conversation: the newest answer is the last. */
export const answers = signal<RagAnswer[]>([]);
export const isBusy = signal(false);
let abort = new AbortController();
let lastId = 0;

export interface QueryBody {
  fields: Record<string, unknown>;
  /** What cannot be sent; "" where all can. */
  fault: string;
}

/** Returns the body of a question, with the earlier turns of the conversation. */
export function buildQuery(question: string, earlier: RagAnswer[]): QueryBody {
  const { topK, mode, filter, maxTokens, model } = options.value;
  const fields: Record<string, unknown> = { question };
  const parsed = parseObject(filter);
  if (parsed.error !== undefined) return { fields, fault: `filter: ${parsed.error}` };
  if (Object.keys(parsed.value).length) fields.filter = parsed.value;
  for (const [name, text] of [["top_k", topK], ["max_tokens", maxTokens]] as const) {
    if (!text.trim()) continue;
    if (!Number.isFinite(Number(text))) return { fields, fault: `${name} must be a number.` };
    fields[name] = Number(text);
  }
  if (mode) fields.mode = mode;
  if (model) fields.model = model;
  const history = earlier.filter((each) => each.state === "done").flatMap((each) => [
    { role: "user", content: each.question },
    { role: "assistant", content: each.text },
  ]);
  if (history.length) fields.history = history;
  return { fields, fault: "" };
}

/** Asks a question. The answer is the last of `answers`, and grows. */
export async function ask(collection: string, question: string): Promise<void> {
  const body = { ...buildQuery(question, answers.value).fields, stream: true };
  const answer = startAnswer(collection, question);
  answers.value = [...answers.value, answer];
  abort = new AbortController();
  isBusy.value = true;
  const request = { body, headers: keyHeaders(collection), signal: abort.signal };
  try {
    for await (const event of streamEvents(pathOf(collection, "query"), request)) {
      if (event.data === "[DONE]") continue;
      addEvent(answer, event.event, JSON.parse(event.data) as Fields);
      show(answer);
    }
    if (answer.state !== "failed") answer.state = "done";
  } catch (error) {
    answer.state = abort.signal.aborted ? "stopped" : "failed";
    if (!abort.signal.aborted) answer.failure = readFailure(error);
  } finally {
    answer.endedAt = performance.now();
    isBusy.value = false;
    show(answer);
  }
}

/** Ends the question that is being answered: the server cancels it. */
export function stop(): void {
  abort.abort();
}

export function clearAnswers(): void {
  stop();
  answers.value = [];
}

function startAnswer(collection: string, question: string): RagAnswer {
  return {
    ...{ id: ++lastId, collection, question, state: "searching", finish: "", text: "" },
    ...{ sources: [], dropped: [], citations: [], encoding: null, usage: null, failure: null },
    ...{ askedAt: performance.now(), foundAt: 0, firstAt: 0, endedAt: 0 },
  };
}

interface Fields extends Partial<Omit<RagAnswer, "text">> {
  text?: string;
  finish_reason?: string;
  error?: { message: string; param?: string | null; code?: string };
}

/** Adds what an event of the stream brings: sources, a piece of text, citations, counts or a failure. */
export function addEvent(answer: RagAnswer, name: string, fields: Fields): void {
  const now = performance.now();
  if (name === "sources") {
    answer.sources = fields.sources ?? [];
    answer.dropped = fields.dropped ?? [];
    answer.encoding = fields.encoding ?? null;
    answer.foundAt = now;
    answer.state = "streaming";
  } else if (name === "token") {
    answer.firstAt ||= now;
    answer.text += fields.text ?? "";
  } else if (name === "citations") answer.citations = fields.citations ?? [];
  else if (name === "usage") {
    answer.usage = fields.usage ?? null;
    answer.finish = fields.finish_reason ?? "";
  } else if (name === "error" && fields.error) {
    const { message, param, code } = fields.error;
    answer.state = "failed";
    answer.failure = { message, field: param ?? "", code: code ?? "" };
  }
}

function show(answer: RagAnswer): void {
  answers.value = answers.value.map((each) => (each.id === answer.id ? { ...answer } : each));
}
