import OpenAI from "openai";
import { base, question, run, tools } from "./tools.mjs";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused" });
const functions = tools.map(({ run, ...rest }) => ({ type: "function", strict: false, ...rest }));
let input = [{ role: "user", content: question }];
let previous;
for (;;) {
  const stream = client.responses.stream({ model: "scripted", input, tools: functions, previous_response_id: previous });
  const response = await stream.finalResponse();
  const calls = response.output.filter((item) => item.type === "function_call");
  if (!calls.length) {
    console.log(response.output_text);
    break;
  }
  previous = response.id;
  input = calls.map(({ call_id, name, arguments: args }) => ({
    type: "function_call_output",
    call_id,
    output: run(name, JSON.parse(args)),
  }));
}
