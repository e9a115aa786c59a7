import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";
import { base, name, question, tools } from "./tools.mjs";

const options = { baseURL: `${base}/v1`, apiKey: "unused" };
const provider = name.endsWith("anthropic")
  ? createAnthropic(options)
  : createOpenAICompatible({ ...options, name: "sluice", includeUsage: true });
const result = streamText({
  model: provider("scripted"),
  prompt: question,
  stopWhen: stepCountIs(9),
  tools: Object.fromEntries(
    tools.map(({ name, description, parameters, run }) => [
      name,
      tool({ description, inputSchema: jsonSchema(parameters), execute: run }),
    ]),
  ),
});
await result.consumeStream({ onError: (error) => { throw error; } });
console.log(await result.text);
