// The chosen model, what was typed for its inputs, and what it answered. They stay while other pages are shown.
import { computed, signal } from "@preact/signals";
import { ApiError, fetchJson, send } from "../../api/client";
import { streamEvents } from "../../api/sse";
import { readFailure, type Failure } from "../../playground/failure";
import { parseObject } from "../../playground/json";
import { checkCount, readResponse } from "./binary";
import { findLayout, readImage, type ImageLayout, type Scaling } from "./image";
import { buildBinary, buildGenerate, modelPath, type ChosenOutput, type InferRequest } from "./request";
import type { Element, ModelConfig, ModelInfo, Tensor, TensorInfo } from "./types";
import { exampleValue, fitShape, readShape, readValues } from "./values";

export interface Model {
  info: ModelInfo;
  config: ModelConfig;
}

/** One input of the form, as it was typed. */
export interface InputForm {
  info: TensorInfo;
  datatype: TensorInfo["datatype"];
  isOptional: boolean;
  isOn: boolean;
  /** "" for the shape that the values have. */
  shape: string;
  text: string;
  layout: ImageLayout | null;
  scaling: Scaling;
  /** What was read from files, in the place of the text. */
  files: ReadFiles | null;
}

export interface ReadFiles {
  names: string[];
  elements: Element[];
  shape: number[];
  /** Read again when the scaling changes. */
  image: File | null;
  picture: string;
}

export interface Result {
  outputs: Tensor[];
  version: string;
  ms: number;
}

export const names = signal<string[] | null>(null);
export const chosen = signal("");
export const version = signal("");
export const model = signal<Model | null>(null);
export const inputs = signal<InputForm[]>([]);
export const outputs = signal<ChosenOutput[]>([]);
export const parameters = signal("");
export const streams = signal(false);
export const result = signal<Result | null>(null);
/** The responses of a stream, as they come. */
export const responses = signal<Record<string, unknown>[]>([]);
export const failure = signal<Failure | null>(null);
export const isBusy = signal(false);
let abort = new AbortController();

export const isDecoupled = computed(() => Boolean(model.value?.config.model_transaction_policy?.decoupled));

/** Asks the server which models it serves. */
export async function loadNames(): Promise<void> {
  await reporting(async () => {
    const index = await fetchJson<{ name: string; state?: string }[]>("/v2/repository/index", { body: { ready: true } });
    names.value = [...new Set(index.filter((each) => each.state === "READY").map((each) => each.name))];
    if (!names.value.includes(chosen.value)) await choose(names.value[0] ?? "");
  });
}

/** Shows another model, or another version of it. */
export async function choose(name: string, wanted = ""): Promise<void> {
  chosen.value = name;
  version.value = wanted;
  model.value = result.value = failure.value = null;
  responses.value = [];
  if (!name) return;
  await reporting(async () => {
    const path = modelPath({ model: name, version: wanted });
    const [info, config] = await Promise.all([fetchJson<ModelInfo>(path), fetchJson<ModelConfig>(`${path}/config`)]);
    if (name !== chosen.value) return;
    model.value = { info, config };
    outputs.value = [];
    parameters.value = "";
    streams.value = isDecoupled.value;
    inputs.value = info.inputs.map((each) => startInput(each, config));
  });
}

/** A model may take its prompt by several inputs that are all optional: the first of them is the one to fill in. */
function startInput(info: TensorInfo, config: ModelConfig): InputForm {
  const found = config.input.find((each) => each.name === info.name);
  const isFirst = config.input[0]?.name === info.name;
  const layout = findLayout(info, found?.format);
  return {
    ...{ info, datatype: info.datatype, layout, files: null, scaling: "none", shape: "" },
    isOptional: Boolean(found?.optional),
    isOn: !found?.optional || isFirst,
    text: exampleValue(info.datatype, info.shape),
  };
}

export function changeInput(name: string, some: Partial<InputForm>): void {
  inputs.value = inputs.value.map((each) => (each.info.name === name ? { ...each, ...some } : each));
}

/** Reads files into an input: an image as pixels where the shape is one of an image, else their bytes. */
export async function readFiles(input: InputForm, files: File[]): Promise<void> {
  const [first] = files;
  if (!first) return;
  try {
    changeInput(input.info.name, { files: await read(input, files, first), isOn: true });
  } catch (error) {
    failure.value = { message: `${first.name}: ${(error as Error).message}`, field: input.info.name, code: "" };
  }
}

async function read(input: InputForm, files: File[], first: File): Promise<ReadFiles> {
  const fileNames = files.map((each) => each.name);
  const picture = first.type.startsWith("image/") ? URL.createObjectURL(first) : "";
  if (input.layout && picture) {
    const image = await readImage(first, input.layout, input.scaling, input.datatype);
    return { names: [first.name], ...image, image: first, picture };
  }
  const contents = await Promise.all(files.map(async (each) => new Uint8Array(await each.arrayBuffer())));
  if (input.datatype === "BYTES") return { names: fileNames, elements: contents, shape: [contents.length], image: null, picture };
  const values = readValues(await first.text(), input.datatype);
  if (values.error !== undefined) throw new Error(`${values.error} A tensor of numbers takes a JSON file or, by its shape, an image.`);
  return { names: [first.name], ...values, image: null, picture: "" };
}

/** Reads an image again with another scaling. */
export async function rescale(input: InputForm, scaling: Scaling): Promise<void> {
  changeInput(input.info.name, { scaling });
  if (input.files?.image) await readFiles({ ...input, scaling }, [input.files.image]);
}

export type Built = { tensor: Tensor; error?: undefined } | { tensor?: undefined; error: string };

/** Returns the tensor of an input, or why there is none. */
export function buildTensor(input: InputForm): Built {
  const { info, datatype, files } = input;
  const values = files ?? readValues(input.text, datatype);
  if ("error" in values && values.error !== undefined) return { error: values.error };
  const { elements, shape: given } = values as { elements: Element[]; shape: number[] };
  const shape = input.shape.trim() ? readShape(input.shape) : fitShape(info.shape, given, elements.length);
  if (!shape && input.shape.trim()) return { error: "The shape must be whole numbers, such as 1, 3, 224, 224." };
  if (!shape) return { error: `${elements.length} elements do not fit the shape [${info.shape.join(", ")}].` };
  const tensor = { name: info.name, datatype, shape, elements };
  const fault = checkCount(tensor);
  return fault ? { error: fault } : { tensor };
}

/** The request that the form says; null where a field cannot be sent. */
export const request = computed<InferRequest | null>(() => {
  const built = inputs.value.filter((each) => each.isOn).map(buildTensor);
  const parsed = parseObject(parameters.value);
  if (parsed.error !== undefined || built.some((each) => each.error !== undefined)) return null;
  return {
    ...{ model: chosen.value, version: version.value, outputs: outputs.value, parameters: parsed.value },
    inputs: built.flatMap((each) => each.tensor ?? []),
  };
});

/** Runs the request. */
export async function run(): Promise<void> {
  const asked = request.value;
  if (!asked) return;
  abort = new AbortController();
  result.value = failure.value = null;
  responses.value = [];
  isBusy.value = true;
  await reporting(() => (streams.value ? runStream(asked) : runOnce(asked)));
  isBusy.value = false;
}

/** Ends the request: the server cancels it. */
export function stop(): void {
  abort.abort();
}

async function runOnce(asked: InferRequest): Promise<void> {
  const { body, jsonSize } = buildBinary(asked);
  const headers = { "inference-header-content-length": String(jsonSize), "content-type": "application/octet-stream" };
  const began = performance.now();
  const answer = await send(`${modelPath(asked)}/infer`, { body, headers, signal: abort.signal });
  const content = new Uint8Array(await answer.arrayBuffer());
  const ms = performance.now() - began;
  const size = Number(answer.headers.get("inference-header-content-length") ?? content.length);
  const found = readResponse(content, size);
  result.value = { outputs: found.outputs, version: found.model_version, ms };
}

async function runStream(asked: InferRequest): Promise<void> {
  const began = performance.now();
  const headers = { "content-type": "application/json" };
  const events = streamEvents(`${modelPath(asked)}/generate_stream`, { body: buildGenerate(asked), headers, signal: abort.signal });
  for await (const event of events) {
    const fields = JSON.parse(event.data) as Record<string, unknown>;
    if (typeof fields.error === "string") throw new ApiError(200, fields.error);
    responses.value = [...responses.value, fields];
  }
  result.value = { outputs: [], version: "", ms: performance.now() - began };
}

async function reporting(work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    if ((error as Error).name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    failure.value = readFailure(error);
  }
}
