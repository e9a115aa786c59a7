// Tensors as bytes, in the order of the v2 protocol's binary data: little-endian, BYTES with their lengths before them.
import { countElements, type Datatype, type Element, type Tensor } from "./types";

const SIZES: Record<Exclude<Datatype, "BYTES">, number> = {
  ...{ BOOL: 1, UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, FP16: 2, BF16: 2 },
  ...{ UINT32: 4, INT32: 4, FP32: 4, UINT64: 8, INT64: 8, FP64: 8 },
};

/** Returns a tensor's bytes. */
export function packTensor({ datatype, elements }: Tensor): Uint8Array<ArrayBuffer> {
  if (datatype === "BYTES") return packTexts(elements);
  const size = SIZES[datatype];
  const view = new DataView(new ArrayBuffer(elements.length * size));
  elements.forEach((each, n) => write(view, n * size, datatype, each));
  return new Uint8Array(view.buffer);
}

/** Returns the elements in a tensor's bytes. */
export function unpackTensor(datatype: Datatype, bytes: Uint8Array): Element[] {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (datatype === "BYTES") return unpackTexts(view, bytes);
  const size = SIZES[datatype];
  return Array.from({ length: bytes.length / size }, (_, n) => read(view, n * size, datatype));
}

function packTexts(elements: Element[]): Uint8Array<ArrayBuffer> {
  const encoder = new TextEncoder();
  const parts = elements.map((each) => (each instanceof Uint8Array ? each : encoder.encode(String(each))));
  const packed = new Uint8Array(parts.reduce((sum, each) => sum + 4 + each.length, 0));
  let at = 0;
  for (const each of parts) {
    new DataView(packed.buffer).setUint32(at, each.length, true);
    packed.set(each, at + 4);
    at += 4 + each.length;
  }
  return packed;
}

/** Elements that are UTF-8 become texts. */
function unpackTexts(view: DataView, bytes: Uint8Array): Element[] {
  const found: Element[] = [];
  for (let at = 0; at < bytes.length; ) {
    const end = at + 4 + view.getUint32(at, true);
    const element = bytes.slice(at + 4, end);
    found.push(decodeText(element) ?? element);
    at = end;
  }
  return found;
}

function decodeText(bytes: Uint8Array): string | null {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return null;
  }
}

function write(view: DataView, at: number, datatype: Datatype, value: Element): void {
  const number = Number(value);
  switch (datatype) {
    case "BOOL":
    case "UINT8":
      return view.setUint8(at, number);
    case "INT8":
      return view.setInt8(at, number);
    case "UINT16":
      return view.setUint16(at, number, true);
    case "INT16":
      return view.setInt16(at, number, true);
    case "FP16":
      return view.setUint16(at, toHalf(number), true);
    case "BF16":
      return view.setUint16(at, toBrainFloat(number), true);
    case "UINT32":
      return view.setUint32(at, number, true);
    case "INT32":
      return view.setInt32(at, number, true);
    case "FP32":
      return view.setFloat32(at, number, true);
    case "UINT64":
      return view.setBigUint64(at, value as bigint, true);
    case "INT64":
      return view.setBigInt64(at, value as bigint, true);
    default:
      return view.setFloat64(at, number, true);
  }
}

function read(view: DataView, at: number, datatype: Datatype): Element {
  switch (datatype) {
    case "BOOL":
      return view.getUint8(at) !== 0;
    case "UINT8":
      return view.getUint8(at);
    case "INT8":
      return view.getInt8(at);
    case "UINT16":
      return view.getUint16(at, true);
    case "INT16":
      return view.getInt16(at, true);
    case "FP16":
      return fromHalf(view.getUint16(at, true));
    case "BF16":
      return fromBits(view.getUint16(at, true) * 0x10000);
    case "UINT32":
      return view.getUint32(at, true);
    case "INT32":
      return view.getInt32(at, true);
    case "FP32":
      return view.getFloat32(at, true);
    case "UINT64":
      return view.getBigUint64(at, true);
    case "INT64":
      return view.getBigInt64(at, true);
    default:
      return view.getFloat64(at, true);
  }
}

const scratch = new DataView(new ArrayBuffer(4));

function toBits(value: number): number {
  scratch.setFloat32(0, value);
  return scratch.getUint32(0);
}

function fromBits(bits: number): number {
  scratch.setUint32(0, bits);
  return scratch.getFloat32(0);
}

/** Rounds to the nearest of bfloat16, ties to even. */
function toBrainFloat(value: number): number {
  const bits = toBits(value);
  if (Number.isNaN(value)) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) / 0x10000) & 0xffff;
}

/** Rounds to the nearest half-precision number, ties to even. */
export function toHalf(value: number): number {
  const sign = Object.is(value, -0) || value < 0 ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const exponent = Math.max(-14, Math.floor(Math.log2(size || 2 ** -14)));
  const unit = 2 ** (exponent - 10);
  const steps = roundToEven(size / unit);
  return sign | (steps < 1024 ? steps : (exponent + 15) * 1024 + steps - 1024);
}

function roundToEven(value: number): number {
  const low = Math.floor(value);
  const rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
}

export function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

interface OutputHead {
  name: string;
  datatype: Datatype;
  shape: number[];
  data?: unknown[];
  parameters?: { binary_data_size?: number };
}

export interface InferResponse {
  model_version: string;
  outputs: Tensor[];
}

/** Reads a response whose JSON, of so many bytes, is followed by the bytes of its tensors. */
export function readResponse(body: Uint8Array, jsonSize: number): InferResponse {
  const head = JSON.parse(new TextDecoder().decode(body.subarray(0, jsonSize))) as {
    model_version: string;
    outputs: OutputHead[];
  };
  let at = jsonSize;
  const outputs = head.outputs.map(({ name, datatype, shape, data, parameters }) => {
    const size = parameters?.binary_data_size ?? 0;
    const elements = data ? (data.flat(Number.POSITIVE_INFINITY) as Element[]) : unpackTensor(datatype, body.subarray(at, at + size));
    at += size;
    return { name, datatype, shape, elements };
  });
  return { model_version: head.model_version, outputs };
}

/** Says that a tensor has not as many elements as its shape; null where it has. */
export function checkCount({ shape, elements }: Tensor): string | null {
  const wanted = countElements(shape);
  if (wanted === elements.length) return null;
  return `The shape has ${wanted} elements, the values are ${elements.length}.`;
}
