// From what was typed to the elements of a tensor.
import type { Datatype, Element } from "./types";

const BIG = new Set<Datatype>(["INT64", "UINT64"]);

/** What a field holds: elements, or why it holds none. */
export type Values = { elements: Element[]; shape: number[]; error?: undefined } | { error: string };

/** Reads JSON as elements, with the shape that its nesting says. Text that is no JSON is one element of BYTES. */
export function readValues(text: string, datatype: Datatype): Values {
  if (datatype === "BYTES" && !text.trimStart().startsWith("[")) return { elements: [text], shape: [1] };
  let parsed: unknown;
  try {
    parsed = JSON.parse(BIG.has(datatype) ? quoteIntegers(text) : text);
  } catch (error) {
    return { error: `This is no JSON: ${(error as Error).message}` };
  }
  const shape: number[] = [];
  const elements: unknown[] = [];
  const fault = flatten(parsed, 0, shape, elements) ?? checkElements(elements, datatype);
  if (fault) return { error: fault };
  return { elements: elements.map((each) => convert(each, datatype)), shape };
}

/** A number of JavaScript holds only 53 bits, so that long ones stay texts until they are bigints. */
function quoteIntegers(text: string): string {
  return text.replace(/-?\d+(?![\d.eE"])/g, '"$&"');
}

/** Puts all elements in order. Returns what is wrong with the nesting, or null. */
function flatten(value: unknown, depth: number, shape: number[], elements: unknown[]): string | null {
  if (!Array.isArray(value)) {
    if (depth < shape.length) return "Arrays and values stand side by side.";
    elements.push(value);
    return null;
  }
  if (shape.length === depth && !elements.length) shape.push(value.length);
  if (shape[depth] !== value.length) return `Arrays side by side have ${shape[depth]} and ${value.length} elements.`;
  for (const each of value) {
    const fault = flatten(each, depth + 1, shape, elements);
    if (fault) return fault;
  }
  return null;
}

function checkElements(elements: unknown[], datatype: Datatype): string | null {
  const wrong = elements.find((each) => !isElement(each, datatype));
  return wrong === undefined ? null : `${JSON.stringify(wrong)} is no element of ${datatype}.`;
}

function isElement(value: unknown, datatype: Datatype): boolean {
  if (datatype === "BYTES") return typeof value === "string";
  if (datatype === "BOOL") return typeof value === "boolean";
  if (BIG.has(datatype)) return typeof value === "string" && /^-?\d+$/.test(value);
  return typeof value === "number" && (isFloat(datatype) || Number.isInteger(value));
}

function convert(value: unknown, datatype: Datatype): Element {
  return BIG.has(datatype) ? BigInt(value as string) : (value as Element);
}

export function isFloat(datatype: Datatype): boolean {
  return datatype.startsWith("FP") || datatype === "BF16";
}

/** Reads a shape such as "1, 3, 224, 224"; "" is that of a single value. Returns null for anything else. */
export function readShape(text: string): number[] | null {
  const words = text.split(/[\s,x×]+/).filter(Boolean);
  const numbers = words.map(Number);
  return numbers.every((each) => Number.isInteger(each) && each >= 0) ? numbers : null;
}

/** Returns the shape that so many elements have where the model fixes some of its dimensions; null: they do not fit. */
export function fitShape(wanted: number[], given: number[], numElements: number): number[] | null {
  const isFree = (each: number) => each < 0;
  if (given.length === wanted.length && wanted.every((each, n) => isFree(each) || each === given[n])) return given;
  const fixed = wanted.filter((each) => !isFree(each)).reduce((product, each) => product * each, 1);
  const free = wanted.filter(isFree).length;
  if (!free) return fixed === numElements ? wanted : null;
  if (!fixed || numElements % fixed) return null;
  const last = wanted.map(isFree).lastIndexOf(true);
  return wanted.map((each, n) => (!isFree(each) ? each : n === last ? numElements / fixed : 1));
}

/** Returns a value to begin with for an input of a shape: a number of elements that is small. */
export function exampleValue(datatype: Datatype, shape: number[]): string {
  if (datatype === "BYTES" && shape.every((each) => each < 0 || each === 1)) return "";
  const sizes = shape.map((each) => (each < 0 ? 1 : each));
  const total = sizes.reduce((product, each) => product * each, 1);
  const element = datatype === "BYTES" ? '""' : datatype === "BOOL" ? "false" : "0";
  return total > 64 ? "" : `[${Array.from({ length: total }, () => element).join(", ")}]`;
}
