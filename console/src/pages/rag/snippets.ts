// Questions and uploads as code that runs by itself.
import {
  curlHeaders,
  curlJson,
  grpcClient,
  pythonArguments,
  pythonHeaders,
  pythonImports,
  pythonKey,
  pythonValue,
  shellWord,
  type Place,
} from "../../playground/code";
import { pathOf } from "./api";
import { typeOf } from "./upload";

export interface RagPlace extends Place {
  collection: string;
  /** Whether the collection has an owner key, which copied code takes from SLUICE_COLLECTION_KEY. */
  hasOwner: boolean;
}

type Fields = Record<string, unknown>;

const PIPELINE = "rag_pipeline";

export function queryCurl(place: RagPlace, fields: Fields): string {
  return curlJson(place, pathOf(place.collection, "query"), { ...fields, stream: true }) + ownerCurl(place);
}

function ownerCurl(place: RagPlace): string {
  return place.hasOwner ? ` \\\n  -H "x-sluice-collection-key: $SLUICE_COLLECTION_KEY"` : "";
}

/** Returns a client of OpenAI's API: the pipeline is a model there, and the collection stands in the field rag. */
export function queryPython(place: RagPlace, fields: Fields): string {
  const { question, history, model, top_k, mode, filter, ...sampling } = fields;
  const rag = { collection: place.collection, ...defined({ top_k, mode, filter }) };
  const messages = [...((history as Fields[] | undefined) ?? []), { role: "user", content: question }];
  const given = { model: model ?? PIPELINE, messages, ...sampling, extra_body: { rag }, stream: true };
  const owner = '    extra_headers={"x-sluice-collection-key": os.environ["SLUICE_COLLECTION_KEY"]},\n';
  return `${pythonImports(withOwner(place), [], ["from openai import OpenAI"])}
client = OpenAI(base_url=${pythonValue(`${place.url}/v1`)}, api_key=${pythonKey(place)})
stream = client.chat.completions.create(
${pythonArguments(given)}${place.hasOwner ? owner : ""})
for chunk in stream:
    for source in chunk.model_extra.get("sources") or []:
        print(f"[{source['id']}] {source['document']}")
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

/** Both keys are read from the environment. */
function withOwner(place: RagPlace): Place {
  return { ...place, hasKey: place.hasKey || place.hasOwner };
}

function defined(fields: Fields): Fields {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

export function queryGrpc(place: RagPlace, fields: Fields): string {
  const { question, history, filter, model, ...rest } = fields;
  const texts = { ...(filter ? { filter: JSON.stringify(filter) } : {}), ...(history ? { history: JSON.stringify(history) } : {}) };
  const parameters = pythonValue({ collection: place.collection, ...rest, ...texts, stream: true });
  const owner = place.hasOwner ? 'parameters["collection_key"] = os.environ["SLUICE_COLLECTION_KEY"]\n' : "";
  return `${pythonImports(withOwner(place), ["import json", "import queue"], ["import numpy as np", "import tritonclient.grpc as grpc"])}
query = grpc.InferInput("query", [1, 1], "BYTES")
query.set_data_from_numpy(np.array([[${pythonValue(question)}]], dtype=np.object_))
parameters = ${parameters}
${owner}answers = queue.Queue()
with grpc.InferenceServerClient(${grpcClient(place)}) as client:
    client.start_stream(lambda result, error: answers.put(error or result)${pythonHeaders(place)})
    client.async_stream_infer(${pythonValue(model ?? PIPELINE)}, [query], parameters=parameters, enable_empty_final_response=True)
    while True:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        sources, text = answer.as_numpy("sources"), answer.as_numpy("response")
        for source in () if sources is None else sources.ravel():
            print(json.loads(source)["document"])
        if text is not None:
            print(text.ravel()[0].decode(), end="", flush=True)
        if answer.get_response().parameters["triton_final_response"].bool_param:
            break
print()
`;
}

/** Returns the command that adds a file to the collection. */
export function uploadCurl(place: RagPlace, name: string): string {
  const path = `${pathOf(place.collection, "documents")}?id=${encodeURIComponent(name)}`;
  const headers = curlHeaders(place, { "content-type": typeOf(name) }) + ownerCurl(place);
  return `curl ${shellWord(place.url + path)}${headers} \\\n  --data-binary ${shellWord(`@${name}`)}`;
}

export function uploadSluice(place: RagPlace, name: string): string {
  return `sluice rag ingest ${shellWord(name)} --collection ${shellWord(place.collection)} --url ${shellWord(place.url)}`;
}
