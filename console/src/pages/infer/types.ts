// The tensors of a model, as its metadata and its configuration describe them.

export const DATATYPES = [
  ...["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"],
  ...["FP16", "BF16", "FP32", "FP64", "BYTES"],
] as const;

export type Datatype = (typeof DATATYPES)[number];

/** An element of a tensor. Integers of 64 bits are bigints; those of BYTES are texts, or the bytes of a file. */
export type Element = number | bigint | boolean | string | Uint8Array;

export interface Tensor {
  name: string;
  datatype: Datatype;
  shape: number[];
  elements: Element[];
}

export interface TensorInfo {
  name: string;
  datatype: Datatype;
  /** -1 where the request chooses. */
  shape: number[];
}

export interface ModelInfo {
  name: string;
  versions: string[];
  platform: string;
  inputs: TensorInfo[];
  outputs: TensorInfo[];
}

export interface InputConfig {
  name: string;
  optional?: boolean;
  format?: "FORMAT_NONE" | "FORMAT_NHWC" | "FORMAT_NCHW";
}

export interface ModelConfig {
  max_batch_size: number;
  input: InputConfig[];
  model_transaction_policy?: { decoupled?: boolean };
}

/** Returns how many elements a tensor of a shape has. */
export function countElements(shape: number[]): number {
  return shape.reduce((product, each) => product * each, 1);
}
