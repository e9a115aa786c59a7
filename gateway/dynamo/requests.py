"""Converts the requests of Dynamo's front end, once, into those of a text model. The front end has rendered the chat
template and tokenized; it also detokenizes, and searches stop strings."""

import json
from collections.abc import Collection, Mapping
from typing import Any, get_type_hints

import msgspec

from sluice.engine.sampling_fields import SAMPLING_FIELDS
from sluice.engine.types import Grammar, GrammarKind, SamplingParams
from sluice.errors import SluiceError, invalid
from sluice.pipelines.text.types import EncodedPrompt, TextRequest

Fields = Mapping[str, Any]

_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1
_TYPES = get_type_hints(SamplingParams)
_OF_FRONT_END = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens", "no_stop_trim"})
"""Fields about the answer's text, which the front end obeys."""
_WITHOUT_EFFECT = frozenset({"formatted_prompt", "return_tokens_as_token_ids", "backend"})
"""Fields that say how the front end or another engine does its work, and change no token."""
_STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_ELSEWHERE = {
    "prompt_embeds": "prompts as embeddings",
    "multi_modal_data": "images, sound and video",
    "encoder_result": "images, sound and video",
    "prefill_result": "prefill on another worker",
    "bootstrap_info": "prefill on another worker",
}
"""Parts of a request that name work which this worker does not do, and what that is."""
_GUIDES = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
}


def parse_request(sent: Fields, request_id: str, adapters: Collection[str]) -> TextRequest:
    """Return the request to a model with these LoRA adapters. `sent` has the prompt as a list of token ids. Raises
    INVALID, naming the field, for what the engine does not do; the engine itself checks ranges and lengths."""
    for name, what in _ELSEWHERE.items():
        if sent.get(name):
            raise invalid(name, f"{name} must be left out: {what} are not supported by a sluice worker")
    model: Any = sent.get("model")
    options = _part(sent, "sampling_options")
    extra = _part(sent, "extra_args")
    options |= _part(extra, "sampling_options")
    _check_search(options)
    structural_tag, grammar = _grammar(_part(options, "guided_decoding"))
    options.pop("guided_decoding", None)
    fields = _sampling_fields(options, _part(sent, "stop_conditions"), _part(sent, "output_options"))
    if grammar is not None:
        fields["grammar"] = grammar
    if not fields.get("max_tokens"):
        fields.pop("max_tokens", None)
    return TextRequest(
        request_id=request_id,
        prompt=EncodedPrompt(sent["token_ids"], sent["token_ids"]),
        sampling=fields,
        structural_tag=structural_tag or "",
        priority=_priority(_part(sent, "routing")),
        cache_salt=_cache_salt(extra),
        adapter=model if model in adapters else "",
    )


def _part(sent: Fields, name: str) -> dict[str, Any]:
    """Return an object within a request; an empty one where it is absent. Raises INVALID for something else."""
    part = sent.get(name)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise invalid(name, f"{name} must be an object, got {part!r:.60}")
    return dict(part)


def _check_search(options: dict[str, Any]) -> None:
    """Take the fields about several answers from `options`. Raises INVALID for more than one answer: Dynamo ends a
    worker's stream at its first finish reason, so that of the others would be lost."""
    for name in ("n", "best_of"):
        if (value := options.pop(name, None)) not in (None, 1):
            expected = "a worker under Dynamo gives one answer to a request; send several requests"
            raise invalid(name, f"{name} must be 1, got {value!r:.60}: {expected}")
    if options.pop("use_beam_search", None):
        raise invalid("use_beam_search", "use_beam_search must be false: this worker samples, got true")


def _sampling_fields(options: Fields, conditions: Fields, output: Fields) -> dict[str, Any]:
    """Return the engine's sampling fields, which Dynamo has in three objects. Raises INVALID for a field of none."""
    sent = {**options, **conditions, **output}
    fields: dict[str, Any] = {}
    stops: list[int] = []
    for name, value in sent.items():
        if value is None or name in _OF_FRONT_END or name in _WITHOUT_EFFECT:
            continue
        if name in _STOP_IDS:
            stops += _convert(name, value, list[int])
        elif name == "bad_words_token_ids":
            fields["bad_words"] = _convert(name, value, _TYPES["bad_words"])
        elif name in SAMPLING_FIELDS:
            # Dynamo writes -1 for a filter that is off; the engine has its own value for that.
            is_off = value == -1 and value in SAMPLING_FIELDS[name].off
            default = SAMPLING_FIELDS[name].default
            fields[name] = default if is_off else _convert(name, value, _TYPES[name])
        elif value not in (False, 0, "", [], {}):
            raise invalid(name, f"{name} is not supported by a sluice worker; leave it out, got {value!r:.60}")
    if stops:
        fields["stop_token_ids"] = tuple(dict.fromkeys(stops))
    return {name: value for name, value in fields.items() if value is not None}


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid(name, f"{name} is of another type: {error}, got {value!r:.60}") from None


def _grammar(guides: Fields) -> tuple[str | None, Grammar | None]:
    """Return the structural tag, as JSON, or the grammar that the output must match. Raises INVALID for several."""
    given = {name: value for name, value in guides.items() if value is not None and name not in _WITHOUT_EFFECT}
    if "whitespace_pattern" in given:
        name = "guided_decoding.whitespace_pattern"
        raise invalid(name, f"{name} is not supported by a sluice worker; leave it out")
    if not given:
        return None, None
    if len(given) > 1:
        names = " and ".join(f"guided_decoding.{name}" for name in given)
        raise invalid("guided_decoding", f"{names} all say what the answer must match; send one of them")
    [(name, value)] = given.items()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if name == "structural_tag":
        return text, None
    if name not in _GUIDES:
        known = ", ".join((*_GUIDES, "structural_tag"))
        raise invalid("guided_decoding", f"guided_decoding must have one of {known}, got {name!r:.60}")
    return None, Grammar(_GUIDES[name], text)


def _priority(routing: Fields) -> int:
    """Return the engine's priority: Dynamo's is higher for what is more urgent, ours lower."""
    priority = routing.get("priority")
    if priority is None:
        return 0
    if type(priority) is not int:
        raise invalid("priority", f"priority must be a whole number, got {priority!r:.60}")
    return min(max(-priority, _MIN_PRIORITY), _MAX_PRIORITY)


def _cache_salt(extra: Fields) -> str:
    """Return the salt of the prefix cache, which the client names in `nvext`."""
    for source in (_part(extra, "nvext"), extra):
        salt = source.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise invalid("cache_salt", f"cache_salt must be a string, got {salt!r:.60}")
        if salt:
            return str(salt)
    return ""


def shown(error: SluiceError) -> str:
    """Return the text of an error for the client, with the field at fault in front where the message lacks it."""
    return error.message if not error.param or error.param in error.message else f"{error.param}: {error.message}"
