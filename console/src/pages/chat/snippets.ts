// A chat request as code that runs by itself.
import { curlJson, grpcClient, pythonArguments, pythonHeaders, pythonImports, pythonKey, pythonValue, type Place } from "../../playground/code";
import type { Body } from "./request";

/** Fields of the body that OpenAI's client has as arguments. Others go into extra_body. */
const OPENAI_FIELDS = new Set([
  ...["model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n", "user"],
  ...["tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs", "logit_bias"],
  ...["frequency_penalty", "presence_penalty", "reasoning_effort", "metadata", "store", "service_tier"],
  ...["stream", "stream_options", "prediction", "verbosity", "prompt_cache_key", "safety_identifier"],
]);

export function chatCurl(place: Place, body: Body): string {
  return curlJson(place, "/v1/chat/completions", body);
}

export function chatPython(place: Place, body: Body): string {
  const fields = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const others = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const given = { ...Object.fromEntries(fields), ...(others.length ? { extra_body: Object.fromEntries(others) } : {}) };
  return `${pythonImports(place, [], ["from openai import OpenAI"])}
client = OpenAI(base_url=${pythonValue(`${place.url}/v1`)}, api_key=${pythonKey(place)})
stream = client.chat.completions.create(
${pythonArguments(given)})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        for call in choice.delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="", flush=True)
print()
`;
}

/** Fields of the body that are parameters of a language model's v2 request. */
const V2_PARAMETERS = new Set([
  ...["temperature", "top_p", "max_tokens", "seed", "top_k", "min_p", "repetition_penalty"],
  ...["presence_penalty", "frequency_penalty"],
]);
/** Fields that change nothing there: a stream is a stream, and its counts come when they are asked for. */
const IMPLIED = new Set(["model", "messages", "stream", "stream_options"]);

/** Returns a client of the v2 protocol over gRPC. A comment names the fields that this protocol does not have. */
export function chatGrpc(place: Place, body: Body): string {
  const { parameters, stop, missing } = readForV2(body);
  return `${pythonImports(place, ["import json", "import queue"], ["import numpy as np", "import tritonclient.grpc as grpc"])}
${missing.length ? `# The v2 protocol has nothing for these fields of the request: ${missing.join(", ")}.\n` : ""}messages = ${pythonValue(body.messages)}


def texts(name, values):
    tensor = grpc.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
    return tensor


inputs = [texts("messages", [json.dumps(messages)])${stop.length ? `, texts("stop", ${pythonValue(stop)})` : ""}]
answers = queue.Queue()
with grpc.InferenceServerClient(${grpcClient(place)}) as client:
    client.start_stream(lambda result, error: answers.put(error or result)${pythonHeaders(place)})
    client.async_stream_infer(
        ${pythonValue(body.model)},
        inputs,
        parameters=${pythonValue(parameters, "        ")},
        enable_empty_final_response=True,
    )
    while True:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        text = answer.as_numpy("text_output")
        if text is not None:
            print(text[0].decode(), end="", flush=True)
        if answer.get_response().parameters["triton_final_response"].bool_param:
            break
print()
`;
}

interface ForV2 {
  parameters: Body;
  stop: string[];
  missing: string[];
}

function readForV2(body: Body): ForV2 {
  const parameters: Body = { stream: true };
  const missing: string[] = [];
  for (const [name, value] of Object.entries(body)) {
    if (V2_PARAMETERS.has(name)) parameters[name] = value;
    else if (name === "response_format" && schemaOf(value) !== undefined) {
      parameters.guided_decoding_guide_type = "json_schema";
      parameters.guided_decoding_guide = JSON.stringify(schemaOf(value));
    } else if (!IMPLIED.has(name) && name !== "stop") missing.push(name);
  }
  const hasImages = JSON.stringify(body.messages).includes('"image_url"');
  const stop = [body.stop ?? []].flat() as string[];
  return { parameters, stop, missing: [...missing, ...(hasImages ? ["images"] : [])] };
}

function schemaOf(format: unknown): unknown {
  return (format as { json_schema?: { schema?: unknown } }).json_schema?.schema;
}
