import { Ollama } from "ollama";
import { base, question, run, tools } from "./tools.mjs";

const client = new Ollama({ host: base });
const functions = tools.map(({ run, ...rest }) => ({ type: "function", function: rest }));
const messages = [{ role: "user", content: question }];
for (;;) {
  const answer = { role: "assistant", content: "", tool_calls: [] };
  for await (const { message } of await client.chat({ model: "scripted", messages, tools: functions, stream: true })) {
    answer.content += message.content;
    answer.tool_calls.push(...(message.tool_calls ?? []));
  }
  if (!answer.tool_calls.length) {
    console.log(answer.content);
    break;
  }
  const results = answer.tool_calls.map(({ function: { name, arguments: args } }) => ({
    role: "tool",
    tool_name: name,
    content: run(name, args),
  }));
  messages.push(answer, ...results);
}
