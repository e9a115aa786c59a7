// An inference request as code that runs by itself, beside the files that it needs.
import { curlHeaders, grpcClient, pythonImports, pythonHeaders, pythonValue, shellWord, type Place } from "../../playground/code";
import { packTensor } from "./binary";
import { buildBinary, buildGenerate, buildJson, isLarge, modelPath, needsBinary, type InferRequest } from "./request";
import type { Datatype, Tensor } from "./types";

export interface SavedFile {
  name: string;
  content: Blob;
}

const BODY_FILE = "request.bin";

/** Returns the files that the copied code reads: tensors that are too large to stand in it. */
export function filesOf(request: InferRequest): SavedFile[] {
  if (!needsBinary(request)) return [];
  const tensors = request.inputs.filter(isLarge).map((each) => ({ name: fileOf(each), content: new Blob([packForNumpy(each)]) }));
  return [{ name: BODY_FILE, content: buildBinary(request).body }, ...tensors];
}

function fileOf(tensor: Tensor): string {
  return `${tensor.name.replace(/[^\w.-]/g, "_")}.bin`;
}

/** NumPy has no numbers of bfloat16: the client makes them of FP32. */
function packForNumpy(tensor: Tensor): Uint8Array<ArrayBuffer> {
  return packTensor(tensor.datatype === "BF16" ? { ...tensor, datatype: "FP32" } : tensor);
}

export function inferCurl(place: Place, request: InferRequest): string {
  const url = shellWord(`${place.url}${modelPath(request)}/infer`);
  if (!needsBinary(request)) return `curl ${url}${curlHeaders(place, JSON_TYPE)} \\\n  -d ${shellWord(buildJson(request))}`;
  const { jsonSize } = buildBinary(request);
  const headers = curlHeaders(place, { "inference-header-content-length": String(jsonSize) });
  return `curl ${url}${headers} \\\n  --data-binary @${BODY_FILE} \\\n  --output answer.bin`;
}

const JSON_TYPE = { "content-type": "application/json" };

export function generateCurl(place: Place, request: InferRequest): string {
  const url = shellWord(`${place.url}${modelPath(request)}/generate_stream`);
  return `curl -N ${url}${curlHeaders(place, JSON_TYPE)} \\\n  -d ${shellWord(buildGenerate(request))}`;
}

const NUMPY: Record<Datatype, string> = {
  ...{ BOOL: "bool_", UINT8: "uint8", UINT16: "uint16", UINT32: "uint32", UINT64: "uint64", BYTES: "object_" },
  ...{ INT8: "int8", INT16: "int16", INT32: "int32", INT64: "int64" },
  ...{ FP16: "float16", BF16: "float32", FP32: "float32", FP64: "float64" },
};

/** Returns a client of tritonclient over HTTP or gRPC. */
export function inferPython(place: Place, request: InferRequest, protocol: "http" | "grpc"): string {
  const isHttp = protocol === "http";
  const outputs = isHttp ? 'result.get_response()["outputs"]' : "result.get_response().outputs";
  const name = isHttp ? 'output["name"]' : "output.name";
  return `${pythonImports(place, [], imports(request, protocol))}
${makeTensors(request)}
client = client_library.InferenceServerClient(${clientArguments(place, isHttp)})
result = client.infer(${pythonValue(request.model)}, inputs${callArguments(request)}${pythonHeaders(place)})
for output in ${outputs}:
    print(${name}, result.as_numpy(${name}))
`;
}

/** Returns a client that reads a stream of responses over gRPC. */
export function streamGrpc(place: Place, request: InferRequest): string {
  return `${pythonImports(place, ["import queue"], imports(request, "grpc"))}
${makeTensors(request)}
answers = queue.Queue()
with client_library.InferenceServerClient(${grpcClient(place)}) as client:
    client.start_stream(lambda result, error: answers.put(error or result)${pythonHeaders(place)})
    client.async_stream_infer(${pythonValue(request.model)}, inputs${callArguments(request)}, enable_empty_final_response=True)
    while True:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        for output in answer.get_response().outputs:
            print(output.name, answer.as_numpy(output.name))
        if answer.get_response().parameters["triton_final_response"].bool_param:
            break
`;
}

/** Returns a reader of the stream of responses over HTTP, which Triton's own client does not have. */
export function streamPython(place: Place, request: InferRequest): string {
  const headers = `{"content-type": "application/json"${place.hasKey ? `, "authorization": f"Bearer {os.environ['SLUICE_API_KEY']}"` : ""}}`;
  return `${pythonImports(place, ["import json", "import urllib.request"], [])}
body = r"""${buildGenerate(request)}"""
request = urllib.request.Request(
    ${pythonValue(`${place.url}${modelPath(request)}/generate_stream`)},
    body.encode(),
    ${headers},
)
with urllib.request.urlopen(request) as stream:
    for line in stream:
        if line.startswith(b"data: "):
            print(json.loads(line.removeprefix(b"data: ")))
`;
}

function imports(request: InferRequest, protocol: "http" | "grpc"): string[] {
  const needsReader = request.inputs.some((each) => isLarge(each) && each.datatype === "BYTES");
  const reader = needsReader ? ["from tritonclient.utils import deserialize_bytes_tensor"] : [];
  return ["import numpy as np", `import tritonclient.${protocol} as client_library`, ...reader];
}

function makeTensors(request: InferRequest): string {
  const inputs = request.inputs.map((each) => `    tensor(${pythonValue(each.name)}, "${each.datatype}", ${arrayOf(each)}),\n`);
  return `
def tensor(name, datatype, values):
    made = client_library.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


inputs = [
${inputs.join("")}]`;
}

function arrayOf(tensor: Tensor): string {
  const shape = tensor.shape.join(", ");
  const file = pythonValue(fileOf(tensor));
  if (!isLarge(tensor)) {
    return `np.array(${pythonValue(tensor.elements, "    ")}, dtype=np.${NUMPY[tensor.datatype]}).reshape(${shape})`;
  }
  if (tensor.datatype === "BYTES") return `deserialize_bytes_tensor(open(${file}, "rb").read()).reshape(${shape})`;
  return `np.fromfile(${file}, dtype=np.${NUMPY[tensor.datatype]}).reshape(${shape})`;
}

/** Parameters that the client takes as arguments of their own, and refuses among the others. */
const ARGUMENTS = new Set(["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"]);

function callArguments(request: InferRequest): string {
  const outputs = request.outputs.map(({ name, classes }) => {
    const count = classes ? `, class_count=${classes}` : "";
    return `client_library.InferRequestedOutput(${pythonValue(name)}${count})`;
  });
  const own = Object.entries(request.parameters).filter(([name]) => ARGUMENTS.has(name));
  const others = Object.entries(request.parameters).filter(([name]) => !ARGUMENTS.has(name));
  const given = [
    ...(request.version ? [`model_version=${pythonValue(request.version)}`] : []),
    ...(outputs.length ? [`outputs=[${outputs.join(", ")}]`] : []),
    ...own.map(([name, value]) => `${name}=${pythonValue(value)}`),
    ...(others.length ? [`parameters=${pythonValue(Object.fromEntries(others))}`] : []),
  ];
  return given.map((each) => `, ${each}`).join("");
}

/** The client over HTTP takes an address without its scheme, and a prefix behind it. */
function clientArguments(place: Place, isHttp: boolean): string {
  if (!isHttp) return grpcClient(place);
  const [scheme, address] = place.url.split("://");
  return `${pythonValue(address)}${scheme === "https" ? ", ssl=True" : ""}`;
}
