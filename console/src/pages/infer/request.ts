// A request of the v2 protocol: as one body of JSON and bytes, and as JSON to read.
import { packTensor } from "./binary";
import type { Element, Tensor } from "./types";

export interface ChosenOutput {
  name: string;
  /** How many classes to return in place of the tensor; 0: the tensor. */
  classes: number;
}

export interface InferRequest {
  model: string;
  /** "" where the server chooses. */
  version: string;
  inputs: Tensor[];
  /** None: those that the model returns by itself. */
  outputs: ChosenOutput[];
  parameters: Record<string, unknown>;
}

/** Returns the path of a model, or of the version that the request names. */
export function modelPath({ model, version }: Pick<InferRequest, "model" | "version">): string {
  return `/v2/models/${encodeURIComponent(model)}${version && `/versions/${version}`}`;
}

export interface BinaryBody {
  body: Blob;
  jsonSize: number;
}

/** Returns the body with all tensors as bytes, and asks for the outputs as bytes. */
export function buildBinary(request: InferRequest): BinaryBody {
  const parts = request.inputs.map(packTensor);
  const inputs = request.inputs.map(({ name, datatype, shape }, n) => ({
    ...{ name, datatype, shape },
    parameters: { binary_data_size: parts[n]?.length ?? 0 },
  }));
  const outputs = request.outputs.map(({ name, classes }) => ({
    name,
    parameters: { binary_data: true, ...(classes ? { classification: classes } : {}) },
  }));
  const parameters = { ...request.parameters, ...(outputs.length ? {} : { binary_data_output: true }) };
  const json = new TextEncoder().encode(JSON.stringify({ inputs, ...(outputs.length ? { outputs } : {}), parameters }));
  return { body: new Blob([json, ...parts]), jsonSize: json.length };
}

/** Returns the body as JSON, an input to a line. */
export function buildJson(request: InferRequest): string {
  const inputs = request.inputs.map(({ name, datatype, shape, elements }) => {
    const head = JSON.stringify({ name, datatype, shape }).slice(0, -1);
    return `${head},"data":${elementsJson(elements)}}`;
  });
  const outputs = request.outputs.map(({ name, classes }) =>
    JSON.stringify({ name, ...(classes ? { parameters: { classification: classes } } : {}) }),
  );
  const members = [
    `"inputs":[\n  ${inputs.join(",\n  ")}\n]`,
    ...(outputs.length ? [`"outputs":[${outputs.join(",")}]`] : []),
    ...(Object.keys(request.parameters).length ? [`"parameters":${JSON.stringify(request.parameters)}`] : []),
  ];
  return `{${members.join(",\n")}}`;
}

function elementsJson(elements: Element[]): string {
  return `[${elements.map((each) => (typeof each === "bigint" ? String(each) : JSON.stringify(each))).join(",")}]`;
}

/** Returns the body of `generate`: each input by its name, a single element without brackets. */
export function buildGenerate({ inputs, parameters }: InferRequest): string {
  const members = inputs.map(({ name, shape, elements }) => {
    const isSingle = elements.length === 1 && shape.every((each) => each === 1);
    return `${JSON.stringify(name)}:${isSingle ? elementsJson(elements).slice(1, -1) : elementsJson(elements)}`;
  });
  const more = Object.keys(parameters).length ? [`"parameters":${JSON.stringify(parameters)}`] : [];
  return `{${[...members, ...more].join(",\n ")}}`;
}

/** JSON has no numbers of 16 bits and no bytes that are no text. */
export function needsBinary({ inputs }: InferRequest): boolean {
  return inputs.some((each) => isLarge(each) || each.datatype === "FP16" || each.datatype === "BF16");
}

const MOST_IN_CODE = 1000;

/** Whether a tensor is too large to stand in code, or holds files: then copied code reads it from a file. */
export function isLarge({ elements }: Tensor): boolean {
  return elements.length > MOST_IN_CODE || elements.some((each) => each instanceof Uint8Array);
}
