"""The APIs that a run can call. Each is one class: the body of a request, and the parsing of an answer."""

from sluice.load.apis.base import Api, ApiContext, AskedTurn, Extra, Framing, ParsedEvent, Prompt
from sluice.load.apis.messages import MessagesApi
from sluice.load.apis.ollama import OllamaChatApi
from sluice.load.apis.openai import ChatApi, CompletionsApi, EmbeddingsApi, RerankApi
from sluice.load.apis.rag import RagApi
from sluice.load.apis.responses import ResponsesApi
from sluice.load.apis.triton import GenerateApi, GenerateStreamApi, InferApi, InferBinaryApi
from sluice.load.config import ApiKind, LoadConfigError, Workload

_APIS: dict[ApiKind, type[Api]] = {
    ApiKind.CHAT: ChatApi,
    ApiKind.COMPLETIONS: CompletionsApi,
    ApiKind.RESPONSES: ResponsesApi,
    ApiKind.MESSAGES: MessagesApi,
    ApiKind.OLLAMA_CHAT: OllamaChatApi,
    ApiKind.GENERATE_STREAM: GenerateStreamApi,
    ApiKind.GENERATE: GenerateApi,
    ApiKind.EMBEDDINGS: EmbeddingsApi,
    ApiKind.RERANK: RerankApi,
    ApiKind.RAG: RagApi,
    ApiKind.INFER: InferApi,
    ApiKind.INFER_BINARY: InferBinaryApi,
}


def make_api(kind: ApiKind) -> Api:
    """Return a new instance of the API of this kind."""
    return _APIS[kind]()


def check_extras(kind: ApiKind, workload: Workload) -> None:
    """Raise LoadConfigError where requests of this API cannot have what the workload asks for."""
    asked = {
        Extra.TURNS: workload.turns.high > 1,
        Extra.IMAGES: workload.num_images > 0,
        Extra.TOOLS: workload.tool_use is not None,
        Extra.JSON_SCHEMA: workload.json_schema is not None,
    }
    for extra in (each for each, is_asked in asked.items() if is_asked):
        takers = [str(each) for each, api in _APIS.items() if extra in api.takes]
        if kind not in takers:
            raise LoadConfigError(f"{extra}: requests of --api {kind} cannot have it; those of {', '.join(takers)} can")
    if kind is ApiKind.OLLAMA_CHAT and workload.tool_use is not None and workload.tool_use.choice != "auto":
        raise LoadConfigError("--tool-choice: Ollama's API has none")


__all__ = ["Api", "ApiContext", "AskedTurn", "Extra", "Framing", "ParsedEvent", "Prompt", "check_extras", "make_api"]
