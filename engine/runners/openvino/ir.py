"""Opens an OpenVINO IR from optimum-intel: a stateful decoder, which gets paged attention and our inputs.
`_offline_transformations` is private in OpenVINO's Python API, hence the pinned version range."""

import logging
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.engine.model_folder import read_json
from sluice.engine.models.config.config_file import ConfigFile, PositiveInt, read_eos_token_ids
from sluice.engine.models.text_model import choose_max_model_len
from sluice.engine.runners.openvino.graph.adapters import named_parameter
from sluice.engine.runners.openvino.graph.model import MAX_CONTEXT_LEN, STEP_INPUTS, Decoder, is_cache
from sluice.engine.runners.openvino.graph.paged_attention import TESTED_VERSION
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)

IR_GRAPH = "openvino_model.xml"
_TOKENS, _SAMPLED = "token_ids", "sampled_rows"
_RENAMED_INPUTS = {"input_ids": _TOKENS}
_ELEMENTWISE = ("Add", "Subtract", "Multiply", "Divide", "Tanh", "Clamp", "Convert")
"""Nodes that may be between the head's matmul and the logits: bias, scale, softcap."""

_QUANTIZATIONS = {ov.Type.u8: "int8", ov.Type.i8: "int8", ov.Type.u4: "int4", ov.Type.i4: "int4"}


class _ContextLimits(msgspec.Struct, frozen=True):
    """The fields in which families give the longest context. The first one present counts."""

    max_position_embeddings: PositiveInt | None = None
    n_positions: PositiveInt | None = None
    max_seq_len: PositiveInt | None = None
    max_sequence_length: PositiveInt | None = None
    seq_length: PositiveInt | None = None
    n_ctx: PositiveInt | None = None


def has_ir(directory: Path) -> bool:
    """Return whether the folder has the files of an IR."""
    return (directory / IR_GRAPH).is_file()


def open_ir(directory: Path, core: ov.Core, max_model_len: int | None) -> Decoder:
    """Open the IR in `directory` and give it a paged cache. `max_model_len` is used if config.json has no length.
    Raises INVALID for a damaged IR or one that is no stateful decoder, UNIMPLEMENTED for one that cannot have a paged
    cache, UNAVAILABLE for an OpenVINO other than the tested one."""
    file = ConfigFile(read_json(directory / "config.json"), directory / "config.json")
    model = _read(directory / IR_GRAPH, core)
    _make_paged(model)
    _select_rows(model)
    _rename_inputs(model)
    return Decoder(
        model=model,
        weights=None,
        model_type=str(file.fields.get("model_type", "unknown")),
        vocab_size=_vocab_size(model),
        eos_token_ids=read_eos_token_ids(directory, file),
        max_model_len=_choose_max_model_len(file, max_model_len),
        quantization=_weights_type(model),
    )


def _read(path: Path, core: ov.Core) -> ov.Model:
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise invalid("model_path", f"{path} is damaged: {_last_line(error)}") from error
    if not model.get_sinks():
        raise invalid(
            "model_path",
            f"{path} keeps no state between calls, so it has no KV cache to be paged; export it with "
            "optimum-cli export openvino --task text-generation-with-past",
        )
    return model


def _make_paged(model: ov.Model) -> None:
    """Replace states, mask and beam index by block tables."""
    try:
        from openvino._offline_transformations import paged_attention_transformation

        paged_attention_transformation(model)
    except ImportError as error:
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"openvino {ov.__version__} has no transformation to paged attention; install openvino {TESTED_VERSION}",
        ) from error
    except RuntimeError as error:
        message = f"OpenVINO cannot give this model a paged KV cache: {_last_line(error)}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path") from error


def _select_rows(model: ov.Model) -> None:
    """Pass only the sampled rows to the head, and make the logits [num_sampled, vocab_size] f32."""
    rows = named_parameter(_SAMPLED, [-1], ov.Type.i32)
    result = model.get_results()[0]
    entrance = _head_entrance(result)
    sampled = ops.gather(entrance.get_source_output(), rows, ops.constant(np.int32(0)))
    entrance.replace_source_output(sampled.output(0))
    logits = result.input(0).get_source_output()
    flat = ops.squeeze(logits, ops.constant(np.array([1], np.int64)))
    result.input(0).replace_source_output(ops.convert(flat, "f32").output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _head_entrance(result: ov.Node) -> ov.Input:
    """Return where hidden states enter the head's matmul; in an unusual graph, where the logits leave."""
    entrance = result.input(0)
    node = entrance.get_source_output().get_node()
    while node.get_type_name() in _ELEMENTWISE:
        node = node.input(0).get_source_output().get_node()
    if node.get_type_name() == "MatMul":
        return node.input(0)
    logger.warning("the head of this IR ends in %s: logits of every token are computed", node.get_type_name())
    return entrance


def _rename_inputs(model: ov.Model) -> None:
    """Give the inputs the names and types of `StepBatch`."""
    for parameter in list(model.get_parameters()):
        name = parameter.output(0).get_any_name()
        ours = _RENAMED_INPUTS.get(name, name)
        if ours in STEP_INPUTS and parameter.get_element_type() != ov.Type.i32:
            _replace_parameter(model, parameter, ours)
        elif ours not in STEP_INPUTS and ours != MAX_CONTEXT_LEN and not is_cache(ours):
            message = f"the IR has an input {name!r}, which is no input of a text decoder"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
    model.validate_nodes_and_infer_types()


def _replace_parameter(model: ov.Model, parameter: ov.Node, name: str) -> None:
    ours = named_parameter(name, [-1], ov.Type.i32)
    converted = ops.convert(ours, parameter.get_element_type().get_type_name()).output(0)
    for target in parameter.output(0).get_target_inputs():
        target.replace_source_output(converted)
    model.remove_parameter(parameter)
    model.add_parameters([ours])


def _vocab_size(model: ov.Model) -> int:
    size: int = model.outputs[0].partial_shape[1].get_length()
    return size


def _choose_max_model_len(file: ConfigFile, requested: int | None) -> int:
    limits = file.read(_ContextLimits)
    most = next((value for value in msgspec.structs.astuple(limits) if value is not None), requested)
    if most is None:
        raise invalid("max_model_len", f"{file.path} does not say how long a context may be: set max_model_len")
    return choose_max_model_len(requested, most)


def _weights_type(model: ov.Model) -> str:
    """Return the narrowest type of the matrices."""
    kinds = {
        _QUANTIZATIONS[node.get_element_type()]
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and len(node.shape) > 1 and node.get_element_type() in _QUANTIZATIONS
    }
    return min(kinds, default="none")


def _last_line(error: Exception) -> str:
    """Return the last line of an error, because OpenVINO's messages begin with places in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
