# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The arguments and requests that the stand-in is given: recorded for tests, and checked as late as the bindings do;
and prompts, which become tokens."""

import json
import zlib
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import pydantic

from ..inputs.multimodal import MultimodalParams
from ..inputs.registry import DefaultInputProcessor, create_input_processor_with_hash
from ..sampling_params import GuidedDecodingParams, SamplingParams
from .settings import settings
from .specifications import type_of
from .work import Order


def record_arguments(arguments: Any) -> None:
    """Record the arguments that were given, without defaults."""
    _record({"arguments": arguments.model_dump(mode="json", exclude_unset=True, fallback=repr)})


def record_request(order: Order, lora: Any) -> None:
    params = order.sampling_params
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    _record(
        {
            "request_id": order.request_id,
            "prompt_token_ids": order.prompt_token_ids,
            "sampling_params": {key: _plain(value) for key, value in values.items() if value is not None},
            "streaming": order.streaming,
            "lora_request": _plain(lora),
            "cache_salt": order.salt,
            "priority": order.priority,
            "conversation_id": order.conversation,
            "request_type": getattr(order.disaggregated_params, "request_type", None),
        }
    )


def record_batch(prompts: list[list[int]], types: list[int]) -> None:
    _record({"encoded": prompts, "token_type_ids": types})


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _record(told: dict[str, Any]) -> None:
    path = settings().record
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(told, default=repr) + "\n")


@cache
def _checks() -> dict[str, pydantic.TypeAdapter[Any]]:
    known = {"GuidedDecodingParams": GuidedDecodingParams}.get
    config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    return {
        each.name: pydantic.TypeAdapter(type_of(str(each.type), known), config=config)
        for each in fields(SamplingParams)
    }


def check_types(params: Any) -> None:
    """Check sampling parameters as the bindings do when a request is sent. Raises TypeError."""
    for name, check in _checks().items():
        try:
            check.validate_python(getattr(params, name))
        except pydantic.ValidationError as error:
            raise TypeError(f"SamplingParams.{name}: {error}") from None


@dataclass
class PreprocessedInputs:
    """A prompt that `generate_async` takes as it is."""

    prompt_token_ids: list[int]
    query_token_ids: list[int] | None = None
    multimodal_params: MultimodalParams | None = None


def preprocess(processor: Any, inputs: Any, params: Any) -> tuple[str | None, PreprocessedInputs]:
    """Return the prompt's text, if it came as text, and its tokens."""
    if isinstance(inputs, str):
        inputs = {"prompt": inputs}
    if isinstance(inputs, list):
        inputs = {"prompt_token_ids": inputs}
    if not isinstance(inputs, dict):
        raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
    text, images = inputs.get("prompt"), inputs.get("multi_modal_data")
    if text is None and (not images or isinstance(processor, DefaultInputProcessor)):
        token_ids = inputs["prompt_token_ids"]
        if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(token_ids)}")
        return None, PreprocessedInputs(_cut(token_ids, params))
    if text is None and settings().version == "1.2.1":  # later processors do so themselves
        inputs = {**inputs, "prompt": processor.tokenizer.decode(inputs["prompt_token_ids"])}
    run = create_input_processor_with_hash(processor) if images else processor
    token_ids, extra = run(inputs, params)
    made = None
    if extra:
        made = MultimodalParams(extra.get("multimodal_input"), extra.get("multimodal_data"))
        made.to_handle("multimodal_data")
    return text, PreprocessedInputs(_cut(token_ids, params), multimodal_params=made)


def _cut(token_ids: list[int], params: Any) -> list[int]:
    return token_ids if params.truncate_prompt_tokens is None else token_ids[-params.truncate_prompt_tokens :]


def open_images(params: MultimodalParams | None) -> tuple[int, bool]:
    """Do a worker's part: take the images out of shared memory. Return a number that is theirs, 0 for none, and whether
    the cache tells them apart."""
    if params is None:
        return 0, True
    params.to_tensor("multimodal_data")
    assert params.multimodal_data is not None
    pixels = params.multimodal_data["image"]["pixel_values"]
    return 1 + zlib.crc32(b"".join(pixels)) % 1000, params.multimodal_input is not None
