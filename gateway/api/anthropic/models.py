"""`/v1/models` in Anthropic's words, for clients that send the header `anthropic-version`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from sluice.errors import SluiceError, invalid
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import error_response
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.model import TextModel

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


def _model_info(model: TextModel) -> dict[str, Any]:
    info = {"type": "model", "id": model.name, "display_name": model.name, "created_at": timestamp(model.created)}
    longest = {} if model.max_model_len is None else {"max_input_tokens": model.max_model_len}
    return {**info, "lifecycle": "active", **longest}
