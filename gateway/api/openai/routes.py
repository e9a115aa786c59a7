"""OpenAI's routes of chat completions, completions and the list of models."""

from functools import partial

from fastapi import APIRouter, Request, Response

from sluice.gateway.api.anthropic.models import is_anthropics, models_response
from sluice.gateway.api.openai.chat import ChatTranslator
from sluice.gateway.api.openai.completions import CompletionTranslator
from sluice.gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from sluice.gateway.api.translators import Answering
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.classifier import TextClassifier
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.reranker import ModelReranker
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.routes.encoder import RoutedEncoder
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.model import TextModel

ListedModel = TextModel | TextEncoder | LlmEncoder | RoutedEncoder | ModelReranker | TextClassifier


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes, which answer from `plane`."""
    chat = partial(ChatTranslator, trusts_templates=config.requests.trusts_templates)
    api = APIRouter(prefix="/v1", tags=["OpenAI"], default_response_class=Response)
    about, about_texts = "Answer a conversation.", "Continue one text or several."
    answering.serve(api, "/chat/completions", "chat_completions", about, ChatCompletionRequest, chat)
    answering.serve(api, "/completions", "completions", about_texts, CompletionRequest, CompletionTranslator)

    @api.get("/models")
    async def models(request: Request) -> Response:
        """List the models: language models first, then pipelines, then encoders, rerankers and classifiers."""
        if is_anthropics(request):
            return models_response(request, plane)
        found = [*plane.text_models(), *_models_without_text(plane)]
        return json_response({"object": "list", "data": [model_object(each) for each in found]})

    @api.get("/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        """Describe one of the models."""
        if is_anthropics(request):
            return models_response(request, plane, model)
        others = {each.name: each for each in _models_without_text(plane)}
        return json_response(model_object(others[model] if model in others else plane.llm(model)))

    return api


def _models_without_text(plane: Plane) -> list[ListedModel]:
    return [
        *plane.encoding.encoders(),
        *plane.routes.encoders(),
        *plane.encoding.rerankers(),
        *plane.encoding.classifiers(),
    ]


def model_object(model: ListedModel) -> dict[str, object]:
    """Return one model in OpenAI's words.

    vLLM adds `max_model_len`, in tokens, where it is known, and an adapter's folder (`root`) and model (`parent`).
    Routes have their targets.
    """
    fields = {"id": model.name, "object": "model", "created": model.created, "owned_by": "sluice"}
    longest = model.max_model_len
    if longest is not None:
        fields["max_model_len"] = longest
    if isinstance(model, AdapterText):
        fields |= {"root": hide_paths(model.root), "parent": model.parent}
    if isinstance(model, RoutedText | RoutedEncoder):
        fields["route"] = model.route.describe()
    return fields
