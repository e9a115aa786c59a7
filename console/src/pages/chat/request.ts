// From what was typed to the body of a chat completion.
import { parseObject, parseTyped } from "../../playground/json";
import type { Answer, ToolCall } from "./answer";

/** What the fields beside a conversation hold, as it was typed; "" where the server's default holds. */
export interface Settings {
  system: string;
  temperature: string;
  topP: string;
  maxTokens: string;
  seed: string;
  /** One a line. */
  stop: string;
  /** A JSON array of tools. */
  tools: string;
  toolChoice: "" | "auto" | "none" | "required";
  /** A JSON schema that the answer matches. */
  schema: string;
  /** Further fields of the body: a JSON object. */
  more: string;
  hasLogprobs: boolean;
  topLogprobs: string;
}

export const NO_SETTINGS: Settings = {
  system: "",
  temperature: "",
  topP: "",
  maxTokens: "200",
  seed: "",
  stop: "",
  tools: "",
  toolChoice: "",
  schema: "",
  more: "",
  hasLogprobs: true,
  topLogprobs: "5",
};

export const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather of a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

export const EXAMPLE_SCHEMA = JSON.stringify(
  {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 }, population: { type: "integer" } },
    required: ["city", "population"],
    additionalProperties: false,
  },
  null,
  2,
);

/** A part of a conversation: what a person wrote, what a model answered, or what its tools returned. */
export type Turn =
  | { kind: "user"; text: string; images: string[] }
  | { kind: "answer"; answer: Answer }
  | { kind: "results"; results: ToolResult[] };

export interface ToolResult {
  call: ToolCall;
  content: string;
}

export type Body = Record<string, unknown>;
export type Faults = Partial<Record<keyof Settings, string>>;

/** What a request asks besides its model and its messages, and which fields hold something that cannot be sent. */
export interface Asked {
  fields: Body;
  faults: Faults;
}

/** Reads the settings. Numbers go to the server as they are: it says what is wrong with them. */
export function readSettings(settings: Settings): Asked {
  const faults: Faults = {};
  const fields: Body = {};
  const number = (key: keyof Settings, name: string) => {
    const text = String(settings[key]).trim();
    if (!text) return;
    if (Number.isFinite(Number(text))) fields[name] = Number(text);
    else faults[key] = `${name} must be a number.`;
  };
  number("temperature", "temperature");
  number("topP", "top_p");
  number("maxTokens", "max_tokens");
  number("seed", "seed");
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  readTools(settings, fields, faults);
  readSchema(settings, fields, faults);
  if (settings.hasLogprobs) {
    fields.logprobs = true;
    number("topLogprobs", "top_logprobs");
  }
  const more = parseObject(settings.more);
  if (more.error !== undefined) faults.more = more.error;
  return { fields: { ...fields, ...more.value }, faults };
}

function readTools(settings: Settings, fields: Body, faults: Faults): void {
  const tools = parseTyped<unknown>(settings.tools, null);
  if (tools.error !== undefined) faults.tools = tools.error;
  else if (Array.isArray(tools.value)) fields.tools = tools.value;
  else if (tools.value !== null) faults.tools = "The tools must be a JSON array. Insert the example to see one.";
  if (settings.toolChoice) fields.tool_choice = settings.toolChoice;
}

function readSchema(settings: Settings, fields: Body, faults: Faults): void {
  if (!settings.schema.trim()) return;
  const schema = parseObject(settings.schema);
  if (schema.error !== undefined) faults.schema = schema.error;
  else fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema.value } };
}

/** Returns the messages of a conversation. A question that got no answer is left out, unless it is the last. */
export function buildMessages(system: string, turns: Turn[]): Body[] {
  const messages: Body[] = system.trim() ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, n) => {
    const next = turns[n + 1];
    if (turn.kind === "user" && next?.kind === "answer" && isEmpty(next.answer)) return;
    if (turn.kind === "answer" && isEmpty(turn.answer)) return;
    messages.push(...turnMessages(turn));
  });
  return messages;
}

function isEmpty(answer: Answer): boolean {
  return !answer.text && !answer.calls.length;
}

function turnMessages(turn: Turn): Body[] {
  if (turn.kind === "user") return [{ role: "user", content: userContent(turn.text, turn.images) }];
  if (turn.kind === "results") {
    return turn.results.map(({ call, content }) => ({ role: "tool", tool_call_id: call.id, content }));
  }
  const { text, calls } = turn.answer;
  if (!calls.length) return [{ role: "assistant", content: text }];
  const toolCalls = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  return [{ role: "assistant", content: text || null, tool_calls: toolCalls }];
}

function userContent(text: string, images: string[]): unknown {
  if (!images.length) return text;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

/** Returns the body that asks a model to go on with a conversation, as a stream. */
export function buildBody(model: string, asked: Asked, system: string, turns: Turn[]): Body {
  const messages = buildMessages(system, turns);
  return { model, messages, ...asked.fields, stream: true, stream_options: { include_usage: true } };
}
