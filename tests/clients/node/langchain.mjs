import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { base, question, tools } from "./tools.mjs";

const llm = new ChatOpenAI({ model: "scripted", apiKey: "unused", configuration: { baseURL: `${base}/v1` } });
const agent = createReactAgent({
  llm,
  tools: tools.map(({ name, description, parameters, run }) => tool(run, { name, description, schema: parameters })),
});
const { messages } = await agent.invoke({ messages: [{ role: "user", content: question }] });
console.log(messages.at(-1).content);
