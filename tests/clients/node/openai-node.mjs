import OpenAI from "openai";
import { base, question, tools } from "./tools.mjs";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused" });
const runner = client.chat.completions.runTools({
  model: "scripted",
  stream: true,
  messages: [{ role: "user", content: question }],
  tools: tools.map(({ run, ...rest }) => ({ type: "function", function: { ...rest, parse: JSON.parse, function: run } })),
});
console.log(await runner.finalContent());
