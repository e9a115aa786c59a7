"""`/v1/models` in Anthropic's words, for clients that send the header `anthropic-version`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.anthropic.pdfs import reads_pdfs
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import error_response
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import EFFORT_ARGUMENT, ChatMessage, Conversation, TextRequest

MAX_PAGE = 1000
"""Most entries of a page, as with Anthropic."""
_DEFAULT_PAGE = 20
_PATH = "/v1/messages"
"""The path whose errors have Anthropic's shape."""


def is_anthropics(request: Request) -> bool:
    """Whether a request for a path that other protocols have, too, is of Anthropic's client."""
    return "anthropic-version" in request.headers


def timestamp(time_s: float) -> str:
    """Return a time, in seconds since 1970, as Anthropic writes it."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def list_page(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"data": items, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}


def models_response(request: Request, plane: Plane, name: str | None = None) -> Response:
    """List the models that answer with messages, or describe the one of that `name`."""
    try:
        if name is not None:
            return json_response(_model_info(plane.llm(name)))
        return json_response(_models_page(request, [_model_info(each) for each in plane.text_models()]))
    except SluiceError as error:
        return error_response(_PATH, error)


def _models_page(request: Request, models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    query = request.query_params
    sent = query.get("limit", str(_DEFAULT_PAGE))
    limit = int(sent) if sent.isascii() and sent.isdecimal() and len(sent) < 8 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise invalid("limit", f"limit must be a whole number from 1 to {MAX_PAGE}, got {sent[:40]!r}")
    if before := query.get("before_id"):
        rest = models[: _place(models, before, "before_id")]
        return list_page(rest[-limit:], has_more=len(rest) > limit)
    after = query.get("after_id")
    rest = models[_place(models, after, "after_id") + 1 :] if after else models
    return list_page(rest[:limit], has_more=len(rest) > limit)


def _place(models: Sequence[dict[str, Any]], model_id: str, param: str) -> int:
    place = next((place for place, model in enumerate(models) if model["id"] == model_id), None)
    if place is None:
        raise invalid(param, f"{param} must be the id of a model, got {model_id[:80]!r}")
    return place


def reasons(model: TextModel) -> bool:
    """Whether a model thinks before it answers, in a format that is known."""
    reader = model.chat_reader(TextRequest(request_id="", prompt=Conversation((ChatMessage("user", ""),))))
    return reader is not None and reader.finds_reasoning


def takes_effort(model: TextModel) -> bool:
    """Whether an effort changes how long a model thinks: its chat template takes one, or the server ends the
    thoughts."""
    return EFFORT_ARGUMENT in model.template_names or reasons(model)


def _model_info(model: TextModel) -> dict[str, Any]:
    info = {"type": "model", "id": model.name, "display_name": model.name, "created_at": timestamp(model.created)}
    lengths = dict.fromkeys(("max_input_tokens", "max_tokens"), model.max_model_len)
    return {**info, "lifecycle": "active", **lengths, "capabilities": _capabilities(model)}


def _capabilities(model: TextModel) -> dict[str, Any]:
    """Return what the model can do of what Anthropic's clients ask for."""
    thinks, has_efforts = _support(reasons(model)), _support(takes_effort(model))
    no, yes = _support(False), _support(True)
    return {
        "batch": yes,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": {**has_efforts, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), has_efforts)},
        "image_input": _support(model.max_images > 0),
        "pdf_input": _support(reads_pdfs()),
        "server_tools": {**no, "code_execution": no, "web_search": no},
        "structured_outputs": yes,
        "thinking": {
            **thinks,
            "types": {"adaptive": thinks, "between_tools": yes, "disabled": yes, "enabled": thinks},
        },
    }


def _support(supported: bool) -> dict[str, Any]:
    return {"supported": supported}
