"""vLLM's `speculative_config` on TensorRT-LLM."""

from typing import Any

import msgspec

from engine.config import Speculation
from pipelines.llm.effects import MOST_DRAFTED, Effect, integer

_NUM_TOKENS = 4
"""Where it does not say."""
_KINDS = {"eagle": "Eagle", "eagle3": "Eagle", "medusa": "Medusa"}
"""TensorRT-LLM's decoding types; its Eagle is Eagle3 too, in every version."""


def speculative_config(text: str) -> Effect:
    """What the JSON object asks for. Raises ValueError with what it must be."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ValueError("must be a JSON object") from None
    method = str(given.get("method", "draft_model")).strip("[]")
    count = integer(str(given.get("num_speculative_tokens", _NUM_TOKENS)), 1, MOST_DRAFTED)
    if method == "ngram":
        return Effect({"speculation": Speculation.NGRAM, "num_speculative_tokens": count})
    if method == "mtp" or method.endswith("_mtp"):
        return drafting(speculative_decoding_type="MTP", num_nextn_predict_layers=str(count))
    return _by_model(method, given.get("model"), count)


def _by_model(method: str, model: object, count: int) -> Effect:
    if method != "draft_model" and method not in _KINDS:
        raise ValueError(f"must have one of the methods ngram, draft_model, {', '.join(_KINDS)} or mtp")
    if not isinstance(model, str):
        raise ValueError(f"must name the model of method {method}, in model")
    if method in _KINDS:
        kind = _KINDS[method]
        return drafting(speculative_decoding_type=kind, speculative_model=model, speculative_max_draft_len=str(count))
    fields = {"speculation": Speculation.DRAFT_MODEL, "draft_model_path": model, "num_speculative_tokens": count}
    return Effect(fields)


def drafting(**settings: str) -> Effect:
    """Drafts of a model's own go instead of those that the command line asks for."""
    return Effect({"speculation": Speculation.OFF}, settings=settings)
