"""The APIs that a run can call. Each is one class: the body of a request, and the parsing of an answer."""

from load.apis.base import Api, Framing, ParsedEvent, Prompt
from load.apis.messages import MessagesApi
from load.apis.ollama import OllamaChatApi
from load.apis.openai import ChatApi, CompletionsApi, EmbeddingsApi, RerankApi, ResponsesApi
from load.apis.triton import GenerateApi, GenerateStreamApi, InferApi, InferBinaryApi
from load.config import ApiKind

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
    ApiKind.INFER: InferApi,
    ApiKind.INFER_BINARY: InferBinaryApi,
}


def make_api(kind: ApiKind) -> Api:
    """Return a new instance of the API of this kind."""
    return _APIS[kind]()


__all__ = ["Api", "Framing", "ParsedEvent", "Prompt", "make_api"]
