// The three tools of a session, and what is common to the programs that use them.
import { readFileSync, statSync, writeFileSync } from "node:fs";

export const [base, name] = process.argv.slice(2);
export const question = `Do as the notes say. [play ${name}]`;
const text = { type: "string" };

export const tools = [
  {
    name: "read_notes",
    description: "Read a file.",
    parameters: { type: "object", properties: { file: text }, required: ["file"] },
    run: ({ file }) => readFileSync(file, "utf8"),
  },
  {
    name: "write_answer",
    description: "Write a file.",
    parameters: { type: "object", properties: { file: text, content: text }, required: ["file", "content"] },
    run: ({ file, content }) => (writeFileSync(file, content), "written"),
  },
  {
    name: "count_bytes",
    description: "Count the bytes of a file.",
    parameters: { type: "object", properties: { file: text }, required: ["file"] },
    run: ({ file }) => String(statSync(file).size),
  },
];

export function run(called, args) {
  return tools.find((tool) => tool.name === called).run(args);
}
