"""From the plain values of a row to the body of a request to the API."""

from typing import Any

import msgspec

from pipelines.llm.asked import MAX_SALT_CHARS
from pipelines.llm.values import Values
from pipelines.remote.fields import COMMON, GUIDE, GUIDE_TYPE, VLLM
from pipelines.remote.options import Dialect, Endpoint, RemoteOptions
from pipelines.remote.remote import Json
from sluice.errors import SluiceError, invalid

_OFF: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "return_log_probs": (False,),
    "exclude_input_in_output": (True,),
    "stop_token_ids": ([],),
    "bad_words": ([], [""]),
}
"""Values that ask for nothing, so that an API which lacks the field gives the same answer without it."""
_LEFT_OUT = frozenset(
    {"text_input", "messages", "stream", "cache_salt", "pad_id", "return_num_input_tokens", "return_num_output_tokens"}
)
"""What is no field of the body, or put there by other means. Counts of tokens always come."""
_GRAMMARS = {"regex": "regex", "ebnf_grammar": "grammar"}
"""vLLM's name for what only it has."""
_REMEDY = "; leave it out, or set the parameter dialect to vllm in the model's configuration where the API is vLLM's"


class _Turn(msgspec.Struct, frozen=True):
    """As much of a message as every API asks for; what else there is in it goes there as it came."""

    role: str
    content: str | list[Any] | None = None


def body_of(values: Values, options: RemoteOptions) -> Json:
    """The body but for the model's name and whether it streams.

    Raises SluiceError INVALID, by name, for a field that would change the answer and that the API does not have.
    """
    body = _prompt(values, options)
    if "max_tokens" in values:
        body[options.length_field] = values["max_tokens"]
    body |= {name: values[name] for name in COMMON if name in values}
    stop = [word for word in values.get("stop_words", ()) if word]  # clients send "" for none
    if stop:
        body["stop"] = stop
    body |= _constraint(values.get(GUIDE_TYPE, ""), values.get(GUIDE, ""), options)
    if options.dialect is Dialect.VLLM:
        body |= _vllm_fields(values)
    _refuse_others(values, options)
    return body


def _prompt(values: Values, options: RemoteOptions) -> Json:
    if options.endpoint is Endpoint.COMPLETIONS:
        if "text_input" not in values or "messages" in values:
            raise invalid("text_input", "give text_input: the model's API continues texts, and takes no messages")
        return {"prompt": values["text_input"]}
    if ("messages" in values) == ("text_input" in values):
        raise invalid("messages", "give messages, or text_input for a conversation of one turn, and not both")
    if "messages" in values:
        return {"messages": _messages(values["messages"])}
    return {"messages": [{"role": "user", "content": values["text_input"]}]}


def _messages(text: str) -> list[Json]:
    try:
        messages: list[Json] = msgspec.json.decode(text, type=list[dict[str, Any]])
        msgspec.convert(messages, list[_Turn])
    except msgspec.MsgspecError as error:
        raise invalid("messages", f"messages must be a JSON array of {{role, content}}: {error}") from None
    if not messages:
        raise invalid("messages", "messages must hold at least one message, got an empty array")
    return messages


def _constraint(kind: str, guide: str, options: RemoteOptions) -> Json:
    """Guided decoding: OpenAI has JSON in chats, vLLM everything everywhere."""
    if not kind:
        if guide:
            raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' is needed with '{GUIDE}'")
        return {}
    is_vllm = options.dialect is Dialect.VLLM
    if kind in ("json", "json_schema") and (is_vllm or options.endpoint is Endpoint.CHAT):
        return {"response_format": _response_format(kind, guide)}
    if kind in _GRAMMARS and is_vllm:
        return {"structured_outputs": {_GRAMMARS[kind]: guide}}
    raise _lacking(GUIDE_TYPE, kind, options)


def _response_format(kind: str, guide: str) -> Json:
    if kind == "json":
        return {"type": "json_object"}
    try:
        schema = msgspec.json.decode(guide, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise invalid(GUIDE, f"input '{GUIDE}' must be a JSON schema: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _vllm_fields(values: Values) -> Json:
    fields = {name: values[name] for name in VLLM if name in values and values[name] not in _OFF[name]}
    salt = values.get("cache_salt", "")
    if len(salt) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters")
    return fields | ({"cache_salt": salt} if salt else {})


def _refuse_others(values: Values, options: RemoteOptions) -> None:
    taken = {"max_tokens", "stop_words", GUIDE, GUIDE_TYPE, *COMMON, *_LEFT_OUT}
    if options.dialect is Dialect.VLLM:
        taken |= set(VLLM)
    for name, value in values.items():
        if name not in taken and value not in _OFF.get(name, ()):
            raise _lacking(name, value, options)


def _lacking(name: str, value: Any, options: RemoteOptions) -> SluiceError:
    remedy = "" if options.dialect is Dialect.VLLM or name not in (*VLLM, GUIDE_TYPE) else _REMEDY
    shown = str(value)[:40]
    return invalid(name, f"'{name}' is '{shown}', which the API of model '{options.model}' does not have{remedy}")
