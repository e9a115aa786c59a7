import Anthropic from "@anthropic-ai/sdk";
import { base, question, tools } from "./tools.mjs";

const client = new Anthropic({ baseURL: base, apiKey: "unused" });
const message = await client.beta.messages.toolRunner({
  model: "scripted",
  max_tokens: 1000,
  messages: [{ role: "user", content: question }],
  tools: tools.map(({ parameters, ...rest }) => ({ ...rest, input_schema: parameters, parse: (input) => input })),
});
console.log(message.content.map((block) => block.text).join(""));
