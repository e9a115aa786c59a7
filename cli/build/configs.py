"""Writes the config.pbtxt files of a built repository."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sluice.cli.build.options import Layout
from sluice.pipelines.llm.fields import INPUTS, OUTPUTS
from sluice.pipelines.stages.stage import POSTPROCESSING, PREPROCESSING
from sluice.serving.config.completion import DeclaredTensor
from sluice.serving.tensors.datatypes import DATA_TYPES

MAX_BATCH_SIZE = 64
"""Rows of one request where the number of sequences is not limited."""
TOKENIZER_FOLDER = "1"
"""Folder of the stages' tokenizer: the version's, since a model store downloads the folders of versions."""


@dataclass(frozen=True, slots=True)
class RepositoryNames:
    """Names of the models of a repository. Without stages it has one model alone."""

    model: str
    preprocessing: str = ""
    postprocessing: str = ""
    ensemble: str = ""

    @property
    def has_stages(self) -> bool:
        return bool(self.ensemble)

    @property
    def all(self) -> tuple[str, ...]:
        """All names, in the order of publication: an ensemble comes after the models that it calls."""
        return tuple(name for name in (self.model, self.preprocessing, self.postprocessing, self.ensemble) if name)


def repository_names(layout: Layout, model: str) -> RepositoryNames:
    if layout is Layout.SINGLE:
        return RepositoryNames(model)
    prefix = f"{model}_" if layout is Layout.PREFIXED else ""
    return RepositoryNames(model, f"{prefix}preprocessing", f"{prefix}postprocessing", f"{prefix}ensemble")


def model_config(name: str, backend: str, max_batch_size: int, parameters: Mapping[str, str]) -> str:
    """Return the configuration of the language model. The backend completes its inputs and outputs."""
    return _config(
        f'name: "{name}"',
        f'backend: "{backend}"',
        f"max_batch_size: {max_batch_size}",
        "model_transaction_policy { decoupled: true }",
        *_parameters(parameters),
    )


def stage_config(name: str, backend: str, max_batch_size: int, parameters: Mapping[str, str]) -> str:
    """Return the configuration of preprocessing or postprocessing."""
    stage = _STAGES[backend]
    return _config(
        f'name: "{name}"',
        f'backend: "{backend}"',
        f"max_batch_size: {max_batch_size}",
        _tensors("input", [each for each in stage.inputs if each.name not in _ENCODER_TENSORS]),
        _tensors("output", [each for each in stage.outputs if each.name not in _ENCODER_TENSORS]),
        *_parameters({"tokenizer_dir": TOKENIZER_FOLDER, **parameters}),
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
    )


def ensemble_config(names: RepositoryNames, max_batch_size: int) -> str:
    """Return the configuration of the ensemble: NVIDIA's text tensors, mapped through the three steps."""
    stage = {each.name: each for each in PREPROCESSING.inputs}
    inputs = [replace(stage[inner], name=name) for name, inner in _PREPROCESSING_INPUTS.items()]
    for name, inner in _MODEL_PARAMETERS.items():
        inputs.append(DeclaredTensor(name, INPUTS[inner].datatype, INPUTS[inner].dims, is_optional=True))
    returned = [OUTPUTS[name] for name in ("text_output", *_RETURNED)]
    steps = ",\n".join(_step(model, *maps) for model, *maps in _steps(names))
    return _config(
        f'name: "{names.ensemble}"',
        'platform: "ensemble"',
        f"max_batch_size: {max_batch_size}",
        _tensors("input", inputs),
        _tensors("output", [DeclaredTensor(each.name, each.datatype, each.dims) for each in returned]),
        f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}",
    )


_STAGES = {"preprocessing": PREPROCESSING, "postprocessing": POSTPROCESSING}
_ENCODER_TENSORS = frozenset({"DECODER_QUERY", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN"})
"""Tensors of preprocessing that only models with an encoder need."""

_PREPROCESSING_INPUTS = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
"""Inputs of the ensemble, and the inputs of preprocessing that receive them."""
_MODEL_PARAMETERS = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "beam_width": "beam_width",
    "num_return_sequences": "num_return_sequences",
    "stream": "streaming",
    "exclude_input_in_output": "exclude_input_in_output",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "lora_task_id": "lora_task_id",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}
"""Inputs of the ensemble, and the inputs of the model that receive them."""
_RETURNED = ("finish_reason", "cum_log_probs", "output_log_probs", "num_input_tokens", "num_output_tokens")
"""Outputs of the model that the ensemble returns beside the text."""
_MODEL_INPUTS = {
    "INPUT_ID": ("_INPUT_ID", "input_ids"),
    "REQUEST_INPUT_LEN": ("_REQUEST_INPUT_LEN", "input_lengths"),
    "REQUEST_OUTPUT_LEN": ("_REQUEST_OUTPUT_LEN", "request_output_len"),
    "BAD_WORDS_IDS": ("_BAD_WORDS_IDS", "bad_words_list"),
    "STOP_WORDS_IDS": ("_STOP_WORDS_IDS", "stop_words_list"),
    "EMBEDDING_BIAS": ("_EMBEDDING_BIAS", "embedding_bias"),
    "OUT_END_ID": ("_END_ID", "end_id"),
    "OUT_PAD_ID": ("_PAD_ID", "pad_id"),
}
"""Outputs of preprocessing: (name in the ensemble, input of the model that receives it)."""
_MODEL_OUTPUTS = {"output_ids": ("_TOKENS", "TOKENS_BATCH"), "sequence_length": ("_LENGTHS", "SEQUENCE_LENGTH")}
"""Outputs of the model: (name in the ensemble, input of postprocessing that receives it)."""

TensorMap = Mapping[str, str]


def _steps(names: RepositoryNames) -> Iterable[tuple[str, TensorMap, TensorMap]]:
    yield (
        names.preprocessing,
        {inner: name for name, inner in _PREPROCESSING_INPUTS.items()},
        {output: tensor for output, (tensor, _) in _MODEL_INPUTS.items()},
    )
    model_inputs = {inner: tensor for tensor, inner in _MODEL_INPUTS.values()}
    model_inputs |= {inner: name for name, inner in _MODEL_PARAMETERS.items()}
    model_outputs = {output: tensor for output, (tensor, _) in _MODEL_OUTPUTS.items()}
    yield names.model, model_inputs, model_outputs | {name: name for name in _RETURNED}
    yield (
        names.postprocessing,
        {inner: tensor for tensor, inner in _MODEL_OUTPUTS.values()},
        {"OUTPUT": "text_output"},
    )


def _step(model: str, inputs: TensorMap, outputs: TensorMap) -> str:
    lines = [f'model_name: "{model}"', "model_version: -1"]
    lines += [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    lines += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    body = "\n".join(f"      {line}" for line in lines)
    return f"    {{\n{body}\n    }}"


def _tensors(kind: str, tensors: Iterable[DeclaredTensor]) -> str:
    lines = [
        f'  {{ name: "{each.name}" data_type: {DATA_TYPES[each.datatype].config_name} '
        f"dims: [ {', '.join(map(str, each.dims))} ]{' optional: true' if each.is_optional else ''} }}"
        for each in tensors
    ]
    return f"{kind} [\n" + ",\n".join(lines) + "\n]"


def _parameters(parameters: Mapping[str, str]) -> Iterable[str]:
    return (f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items())


def _config(*lines: str) -> str:
    return "# Made by `sluice build`.\n" + "\n".join(lines) + "\n"
