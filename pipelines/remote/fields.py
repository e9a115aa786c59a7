"""The tensors of a hosted LLM: those of our own LLMs' text face, as far as the API has them."""

from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from pipelines.llm.fields import INPUTS, Input
from pipelines.remote.options import Dialect, Endpoint, RemoteOptions
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import DATA_TYPES
from sluice.errors import SluiceError, invalid

GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
COMMON = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
"""Fields that every API has under our name."""
VLLM = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words")
"""Those that vLLM, and Sluice, add under our name."""
_TAKEN = (
    *("text_input", "max_tokens", *COMMON, "stop_words", "stop", GUIDE_TYPE, GUIDE),
    *("stream", "streaming", "sampling_config", "sampling_parameters", "cache_salt"),
    *("return_num_input_tokens", "return_num_output_tokens"),
)


@dataclass(frozen=True, slots=True)
class Output:
    """An output, of dims [1]."""

    name: str
    datatype: str


OUTPUTS: dict[str, Output] = {
    each.name: each
    for each in (
        Output("text_output", "BYTES"),
        Output("finish_reason", "BYTES"),
        Output("num_input_tokens", "INT32"),
        Output("num_output_tokens", "INT32"),
        Output("num_cached_tokens", "INT32"),
    )
}
"""By name. All but the text come with the end; the counts only where the API tells them."""


def completed(config: ModelConfig, options: RemoteOptions) -> ModelConfig:
    """`config` with the tensors of an LLM, on the sides where it declares none; then it is decoupled."""
    whole = ModelConfig()
    whole.CopyFrom(config)
    if not whole.input and not whole.output and not whole.HasField("model_transaction_policy"):
        whole.model_transaction_policy.decoupled = True
    if not whole.input:
        whole.input.extend(
            ModelInput(name=each.name, data_type=_number(each.datatype), dims=each.dims, optional=True)
            for each in known_inputs(options).values()
        )
    if not whole.output:
        whole.output.extend(
            ModelOutput(name=each.name, data_type=_number(each.datatype), dims=[1]) for each in OUTPUTS.values()
        )
    return whole


def known_inputs(options: RemoteOptions) -> dict[str, Input]:
    """What a model behind this API takes, by name."""
    names = _TAKEN + (VLLM if options.dialect is Dialect.VLLM else ())
    own = ("messages",) if options.endpoint is Endpoint.CHAT else ()
    return {name: INPUTS[name] for name in own + names}


def declared_inputs(spec: ModelSpec, options: RemoteOptions) -> dict[str, Input]:
    """What each declared input means. Raises SluiceError INVALID for tensors that the API could not follow."""
    known = known_inputs(options)
    for name, given in spec.inputs.items():
        if name not in known:
            raise _unknown(spec.name, "input", name, known)
        _check_type(spec.name, "input", given, known[name].datatype)
    for name, given in spec.outputs.items():
        if name not in OUTPUTS:
            raise _unknown(spec.name, "output", name, OUTPUTS)
        _check_type(spec.name, "output", given, OUTPUTS[name].datatype)
        if given.dims not in ((1,), (-1,)):
            raise invalid(
                "output", f"output '{name}' of model '{spec.name}' must have dims [1], got {list(given.dims)}"
            )
    if not {"text_input", "messages"} & spec.inputs.keys():
        raise invalid("input", f"model '{spec.name}' declares neither text_input nor messages: nothing could be asked")
    return {name: known[name] for name in spec.inputs}


def _check_type(model: str, what: str, given: TensorSpec, expected: str) -> None:
    """Integers of any size will do for an integer, and floats alike."""
    kinds = [DATA_TYPES[name].dtype.kind.replace("u", "i") for name in (expected, given.data_type.name)]
    if kinds[0] != kinds[1]:
        message = f"{what} '{given.name}' of model '{model}' must be of type {expected}, got {given.data_type.name}"
        raise invalid(what, message)


def _unknown(model: str, what: str, name: str, known: dict[str, Any]) -> SluiceError:
    listed = ", ".join(sorted(known))
    return invalid(what, f"model '{model}' declares the {what} '{name}', which its API has not; there are {listed}")


def _number(datatype: str) -> int:
    return int(DataType.Value(DATA_TYPES[datatype].config_name))
