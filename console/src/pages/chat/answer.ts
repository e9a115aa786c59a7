// An answer as it grows, chunk by chunk.
import type { Failure } from "../../playground/failure";

export interface Alternative {
  text: string;
  logprob: number;
}

export interface Token extends Alternative {
  /** The likeliest tokens in its place, the likeliest first. */
  alternatives: Alternative[];
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as far as it has come. */
  args: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
  completion_tokens_details?: { reasoning_tokens?: number };
}

export interface Source {
  id?: number;
  document: string;
  heading?: string;
}

export type AnswerState = "waiting" | "streaming" | "done" | "stopped" | "failed";

export interface Answer {
  model: string;
  state: AnswerState;
  text: string;
  reasoning: string;
  calls: ToolCall[];
  /** The tokens of the text and those of the reasoning, where the request asks for them; those of calls are left out. */
  tokens: Token[];
  reasoningTokens: Token[];
  sources: Source[];
  finish: string;
  usage: Usage | null;
  failure: Failure | null;
  /** Milliseconds on the browser's clock: when it was asked, and when the first and the last piece came; 0: not yet. */
  askedAt: number;
  firstAt: number;
  lastAt: number;
}

/** Returns an answer of which nothing has come. */
export function startAnswer(model: string, now: number): Answer {
  return {
    model,
    state: "waiting",
    text: "",
    reasoning: "",
    calls: [],
    tokens: [],
    reasoningTokens: [],
    sources: [],
    finish: "",
    usage: null,
    failure: null,
    askedAt: now,
    firstAt: 0,
    lastAt: 0,
  };
}

/** Returns an answer that does not change with the given one. */
export function copyAnswer(answer: Answer): Answer {
  const { calls, tokens, reasoningTokens } = answer;
  return { ...answer, calls: calls.map((each) => ({ ...each })), tokens: [...tokens], reasoningTokens: [...reasoningTokens] };
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  reasoning?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

interface RawToken {
  token: string;
  logprob: number;
  bytes: number[] | null;
  top_logprobs?: RawToken[];
}

export interface Chunk {
  error?: { message: string; param?: string | null; code?: string | null };
  sources?: Source[];
  usage?: Usage | null;
  choices?: {
    delta?: Delta;
    logprobs?: { content?: RawToken[] | null } | null;
    finish_reason?: string | null;
  }[];
}

/** Adds what a chunk of the stream brings. */
export function addChunk(answer: Answer, chunk: Chunk, now: number): void {
  if (chunk.error) {
    const { message, param, code } = chunk.error;
    fail(answer, { message, field: param ?? "", code: code ?? "" });
    return;
  }
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.sources) answer.sources = chunk.sources;
  for (const choice of chunk.choices ?? []) {
    if (choice.delta) addDelta(answer, choice.delta, now);
    addTokens(answer, choice.delta ?? {}, choice.logprobs?.content ?? []);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }
}

function addDelta(answer: Answer, delta: Delta, now: number): void {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const text = delta.content ?? "";
  if (!text && !reasoning && !delta.tool_calls?.length) return;
  answer.state = "streaming";
  answer.firstAt ||= now;
  answer.lastAt = now;
  answer.text += text;
  answer.reasoning += reasoning;
  for (const piece of delta.tool_calls ?? []) {
    const call = (answer.calls[piece.index] ??= { id: "", name: "", args: "" });
    if (piece.id) call.id = piece.id;
    call.name += piece.function?.name ?? "";
    call.args += piece.function?.arguments ?? "";
  }
}

function addTokens(answer: Answer, delta: Delta, tokens: RawToken[]): void {
  const isOfCall = delta.tool_calls?.length || (answer.calls.length > 0 && !delta.content);
  if (!tokens.length || isOfCall) return;
  const isReasoning = Boolean(delta.reasoning_content ?? delta.reasoning);
  (isReasoning ? answer.reasoningTokens : answer.tokens).push(...tokens.map(readToken));
}

function readToken(raw: RawToken): Token {
  return { ...readAlternative(raw), alternatives: (raw.top_logprobs ?? []).map(readAlternative) };
}

function readAlternative({ token, bytes, logprob }: RawToken): Alternative {
  return { text: tokenText(token, bytes), logprob };
}

/** Returns a token's text. A token that is a part of a character is shown by its bytes, such as \xe2. */
function tokenText(token: string, bytes: number[] | null): string {
  if (!bytes || !token.includes("\ufffd")) return token;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return bytes.map((each) => `\\x${each.toString(16).padStart(2, "0")}`).join("");
  }
}

/** Ends an answer with a failure. What had come stays. */
export function fail(answer: Answer, failure: Failure): void {
  answer.state = "failed";
  answer.failure = failure;
}

/** Ends an answer whose stream has ended: it is done, unless it has failed. */
export function finish(answer: Answer): void {
  if (answer.state === "failed") return;
  const message = "The stream ended before the answer did.";
  if (answer.finish) answer.state = "done";
  else fail(answer, { message, field: "", code: "" });
}

export interface Timing {
  ttftMs: number;
  totalMs: number;
  /** Tokens a second after the first; null where too few came to tell. */
  tokensPerS: number | null;
}

/** Returns what the browser saw of an answer's speed; null before its first token. */
export function readTiming(answer: Answer): Timing | null {
  if (!answer.firstAt) return null;
  const later = (answer.usage?.completion_tokens ?? 0) - 1;
  const span = answer.lastAt - answer.firstAt;
  return {
    ttftMs: answer.firstAt - answer.askedAt,
    totalMs: answer.lastAt - answer.askedAt,
    tokensPerS: later > 0 && span > 0 ? (later * 1000) / span : null,
  };
}
