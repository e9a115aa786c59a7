"""The fields of a hosted LLM: the tensors it may declare, and the body of a request to its API made of them.

The tensors are the text tensors of the local LLMs (`pipelines/llm/fields.py`), as far as the API supports them.
"""

from copy import deepcopy
from typing import Any

import msgspec
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

from sluice.engine.sampling_fields import SAMPLING_FIELDS, FieldOrigin
from sluice.errors import SluiceError, invalid
from sluice.pipelines.llm.configuration import config_type, is_compatible
from sluice.pipelines.llm.fields import INPUTS, LlmInput
from sluice.pipelines.llm.parse import GUIDE, GUIDE_TYPE, check_cache_salt
from sluice.pipelines.llm.values import Values
from sluice.pipelines.remote.client import Json
from sluice.pipelines.remote.options import ApiDialect, Endpoint, RemoteOptions
from sluice.serving.spec import ModelSpec, TensorSpec


def _fields_of(origin: FieldOrigin) -> tuple[str, ...]:
    fields = (each for each in SAMPLING_FIELDS.values() if each.origin is origin)
    return tuple(each.name for each in fields if each.datatype and each.name != "max_tokens")


COMMON = _fields_of(FieldOrigin.OPENAI)
"""Inputs that every API has under the same name."""
VLLM = (*_fields_of(FieldOrigin.VLLM), "bad_words")
"""Inputs that vLLM's API, and Sluice's, have besides, under the same name."""
_ACCEPTED = (
    *("text_input", "max_tokens", *COMMON, "stop_words", "stop", GUIDE_TYPE, GUIDE),
    *("stream", "streaming", "sampling_config", "sampling_parameters", "cache_salt"),
    *("return_num_input_tokens", "return_num_output_tokens"),
)
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "INT32",
    "num_output_tokens": "INT32",
    "num_cached_tokens": "INT32",
}
"""Datatypes of the outputs by name; all have dims [1]. All but the text come with the end of the answer, and the counts
only where the API gives them."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: field.off for name, field in SAMPLING_FIELDS.items() if name not in COMMON and not field.is_optional},
    "return_log_probs": (False,),
    "return_perf_metrics": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "num_return_sequences": (1,),
    "exclude_input_in_output": (True,),
    "bad_words": ([], [""]),
}
"""Values that ask for nothing: an API without the field gives the same answer without it."""
_NOT_IN_BODY = frozenset(
    {"text_input", "messages", "stream", "cache_salt", "pad_id", "return_num_input_tokens", "return_num_output_tokens"}
)
"""Inputs that are not fields of the body, or are put there in another way. Counts of tokens are always requested."""
_GRAMMARS = {"regex": "regex", "ebnf_grammar": "grammar"}
"""vLLM's names of grammars that only its API takes."""
_BYTES_PER_TOKEN = 3
_REMEDY = "; leave it out, or set the parameter dialect to vllm in the model's configuration where the API is vLLM's"


def complete_config(config: ModelConfig, options: RemoteOptions) -> ModelConfig:
    """Return `config` with the tensors of an LLM, as inputs and outputs where it declares none.

    The model is decoupled where it declares neither.
    """
    whole = deepcopy(config)
    if not whole.input and not whole.output and not whole.HasField("model_transaction_policy"):
        whole.model_transaction_policy.decoupled = True
    if not whole.input:
        whole.input.extend(
            ModelInput(name=each.name, data_type=config_type(each.datatype), dims=each.dims, optional=True)
            for each in known_inputs(options).values()
        )
    if not whole.output:
        whole.output.extend(
            ModelOutput(name=name, data_type=config_type(datatype), dims=[1]) for name, datatype in OUTPUTS.items()
        )
    return whole


def known_inputs(options: RemoteOptions) -> dict[str, LlmInput]:
    """Return the inputs of a model behind this API, by name."""
    names = _ACCEPTED + (VLLM if options.dialect is ApiDialect.VLLM else ())
    chat = ("messages",) if options.endpoint is Endpoint.CHAT else ()
    return {name: INPUTS[name] for name in chat + names}


def declared_inputs(spec: ModelSpec, options: RemoteOptions) -> dict[str, LlmInput]:
    """Return the declared inputs by name. Raises SluiceError INVALID for tensors that the API cannot follow."""
    known = known_inputs(options)
    for name, given in spec.inputs.items():
        if name not in known:
            raise _unknown(spec.name, "input", name, known)
        _check_type(spec.name, "input", given, known[name].datatype)
    for name, given in spec.outputs.items():
        if name not in OUTPUTS:
            raise _unknown(spec.name, "output", name, OUTPUTS)
        _check_type(spec.name, "output", given, OUTPUTS[name])
        if given.dims not in ((1,), (-1,)):
            raise invalid(
                "output", f"output '{name}' of model '{spec.name}' must have dims [1], got {list(given.dims)}"
            )
    if not {"text_input", "messages"} & spec.inputs.keys():
        raise invalid("input", f"model '{spec.name}' declares neither text_input nor messages: nothing could be asked")
    return {name: known[name] for name in spec.inputs}


def _check_type(model: str, what: str, given: TensorSpec, expected: str) -> None:
    if not is_compatible(expected, given.data_type.name):
        message = f"{what} '{given.name}' of model '{model}' must be of type {expected}, got {given.data_type.name}"
        raise invalid(what, message)


def _unknown(model: str, what: str, name: str, known: dict[str, Any]) -> SluiceError:
    listed = ", ".join(sorted(known))
    return invalid(what, f"model '{model}' declares the {what} '{name}', which its API has not; there are {listed}")


class _Turn(msgspec.Struct, frozen=True):
    """The part of a message that every API needs, for the check. The message is passed on unchanged."""

    role: str
    content: str | list[Any] | None = None


def build_body(values: Values, options: RemoteOptions) -> Json:
    """Build the body, without the model's name and without whether it streams.

    Raises SluiceError INVALID, by name, for a value that would change the answer and that the API does not support.
    """
    body = _prompt(values, options)
    if "max_tokens" in values:
        body[options.length_field] = values["max_tokens"]
    body |= {name: values[name] for name in COMMON if name in values}
    stop = [word for word in values.get("stop_words", ()) if word]  # "" stands for none
    if stop:
        body["stop"] = stop
    body |= _constraint(values.get(GUIDE_TYPE, ""), values.get(GUIDE, ""), options)
    if options.dialect is ApiDialect.VLLM:
        body |= _vllm_fields(values)
    _refuse_others(values, options)
    return body


def estimate_prompt_tokens(body: Json) -> int:
    """Return about how many tokens the prompt has, whose tokenizer is the API's."""
    return len(msgspec.json.encode(body.get("prompt") or body["messages"])) // _BYTES_PER_TOKEN


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
    except (ValueError, RecursionError) as error:
        raise invalid("messages", f"messages must be a JSON array of {{role, content}}: {error}") from None
    if not messages:
        raise invalid("messages", "messages must hold at least one message, got an empty array")
    return messages


def _constraint(kind: str, guide: str, options: RemoteOptions) -> Json:
    """Return the fields of guided decoding. OpenAI's API has JSON in chats, vLLM's has every kind everywhere."""
    if not kind:
        if guide:
            raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' is needed with '{GUIDE}'")
        return {}
    is_vllm = options.dialect is ApiDialect.VLLM
    if kind in ("json", "json_schema") and (is_vllm or options.endpoint is Endpoint.CHAT):
        return {"response_format": _response_format(kind, guide)}
    if kind in _GRAMMARS and is_vllm:
        return {"structured_outputs": {_GRAMMARS[kind]: guide}}
    raise _unsupported(GUIDE_TYPE, kind, options)


def _response_format(kind: str, guide: str) -> Json:
    if kind == "json":
        return {"type": "json_object"}
    try:
        schema = msgspec.json.decode(guide, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise invalid(GUIDE, f"input '{GUIDE}' must be a JSON schema: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _vllm_fields(values: Values) -> Json:
    fields = {name: values[name] for name in VLLM if name in values and values[name] not in _NEUTRAL[name]}
    salt = check_cache_salt(values.get("cache_salt", ""))
    return fields | ({"cache_salt": salt} if salt else {})


def _refuse_others(values: Values, options: RemoteOptions) -> None:
    supported = {"max_tokens", "stop_words", GUIDE, GUIDE_TYPE, *COMMON, *_NOT_IN_BODY}
    if options.dialect is ApiDialect.VLLM:
        supported |= set(VLLM)
    for name, value in values.items():
        if name not in supported and value not in _NEUTRAL.get(name, ()):
            raise _unsupported(name, value, options)


def _unsupported(name: str, value: Any, options: RemoteOptions) -> SluiceError:
    remedy = "" if options.dialect is ApiDialect.VLLM or name not in (*VLLM, GUIDE_TYPE) else _REMEDY
    shown = str(value)[:40]
    return invalid(name, f"'{name}' is '{shown}', which the API of model '{options.model}' does not have{remedy}")
