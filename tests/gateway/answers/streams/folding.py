"""What streamed events add up to, whichever way their tokens were merged."""

import json
from collections.abc import Iterable
from typing import Any


def fold(events: Iterable[bytes]) -> dict[Any, Any]:
    """Return what the events of a chat or a completion say together: of each choice its text, its calls, its log
    probabilities and its end; and the usage. Raises AssertionError for an error among them."""
    folded: dict[Any, Any] = {}
    for event in events:
        data = event.rpartition(b"data: ")[2]
        if data == b"[DONE]":
            folded["is_done"] = True
            continue
        payload = json.loads(data)
        assert "error" not in payload, payload
        if payload.get("usage"):
            folded["usage"] = {**payload["usage"], "prompt_tokens_details": "as the cache had them"}
        for choice in payload["choices"]:
            _add(folded.setdefault(choice["index"], {"text": "", "calls": "", "logprobs": [], "roles": 0}), choice)
    return folded


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = piece.get("delta", {})
    choice["text"] += piece.get("text") or delta.get("content") or ""
    choice["roles"] += "role" in delta
    for call in delta.get("tool_calls", ()):
        choice["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
    logprobs = piece.get("logprobs")
    if logprobs is not None:
        found = [each["token"] for each in logprobs["content"]] if "content" in logprobs else logprobs["tokens"]
        choice["logprobs"] += found
    if piece["finish_reason"] is not None:
        assert "finish" not in choice, "a second end"
        choice["finish"] = piece["finish_reason"]
