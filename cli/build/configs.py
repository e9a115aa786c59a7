"""Writes the config.pbtxt files of a built repository."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cli.build.options import Layout

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
    inputs, outputs = _STAGES[backend]
    return _config(
        f'name: "{name}"',
        f'backend: "{backend}"',
        f"max_batch_size: {max_batch_size}",
        _tensors("input", inputs),
        _tensors("output", outputs),
        *_parameters({"tokenizer_dir": TOKENIZER_FOLDER, **parameters}),
        "instance_group [ { kind: KIND_CPU count: 1 } ]",
    )


def ensemble_config(names: RepositoryNames, max_batch_size: int) -> str:
    """Return the configuration of the ensemble: NVIDIA's text tensors, mapped through the three steps."""
    steps = ",\n".join(_step(model, *maps) for model, *maps in _steps(names))
    return _config(
        f'name: "{names.ensemble}"',
        'platform: "ensemble"',
        f"max_batch_size: {max_batch_size}",
        _tensors("input", [tensor for tensor, _, _ in _ENSEMBLE_INPUTS]),
        _tensors("output", [tensor for tensor, _ in _ENSEMBLE_OUTPUTS]),
        f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}",
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    data_type: str
    dims: str = "1"
    is_optional: bool = True


_QUERY, _TEXT = _Tensor("QUERY", "STRING", is_optional=False), _Tensor("OUTPUT", "STRING", "-1")
_STAGES: dict[str, tuple[list[_Tensor], list[_Tensor]]] = {
    "preprocessing": (
        [
            _QUERY,
            _Tensor("REQUEST_OUTPUT_LEN", "INT32", is_optional=False),
            _Tensor("BAD_WORDS_DICT", "STRING", "-1"),
            _Tensor("STOP_WORDS_DICT", "STRING", "-1"),
            _Tensor("EMBEDDING_BIAS_WORDS", "STRING", "-1"),
            _Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", "-1"),
            _Tensor("END_ID", "INT32"),
            _Tensor("PAD_ID", "INT32"),
        ],
        [
            _Tensor("INPUT_ID", "INT32", "-1"),
            _Tensor("REQUEST_INPUT_LEN", "INT32"),
            _Tensor("BAD_WORDS_IDS", "INT32", "2, -1"),
            _Tensor("STOP_WORDS_IDS", "INT32", "2, -1"),
            _Tensor("EMBEDDING_BIAS", "FP32", "-1"),
            _Tensor("REQUEST_OUTPUT_LEN", "INT32", "-1"),
            _Tensor("OUT_END_ID", "INT32"),
            _Tensor("OUT_PAD_ID", "INT32"),
        ],
    ),
    "postprocessing": (
        [
            _Tensor("TOKENS_BATCH", "INT32", "-1, -1", is_optional=False),
            _Tensor("SEQUENCE_LENGTH", "INT32", "-1", is_optional=False),
        ],
        [_TEXT],
    ),
}

_PREPROCESSING, _MODEL = "preprocessing", "model"
_ENSEMBLE_INPUTS = (
    (_Tensor("text_input", "STRING", is_optional=False), _PREPROCESSING, "QUERY"),
    (_Tensor("max_tokens", "INT32", is_optional=False), _PREPROCESSING, "REQUEST_OUTPUT_LEN"),
    (_Tensor("bad_words", "STRING", "-1"), _PREPROCESSING, "BAD_WORDS_DICT"),
    (_Tensor("stop_words", "STRING", "-1"), _PREPROCESSING, "STOP_WORDS_DICT"),
    (_Tensor("embedding_bias_words", "STRING", "-1"), _PREPROCESSING, "EMBEDDING_BIAS_WORDS"),
    (_Tensor("embedding_bias_weights", "FP32", "-1"), _PREPROCESSING, "EMBEDDING_BIAS_WEIGHTS"),
    (_Tensor("end_id", "INT32"), _PREPROCESSING, "END_ID"),
    (_Tensor("pad_id", "INT32"), _PREPROCESSING, "PAD_ID"),
    (_Tensor("top_k", "INT32"), _MODEL, "runtime_top_k"),
    (_Tensor("top_p", "FP32"), _MODEL, "runtime_top_p"),
    (_Tensor("temperature", "FP32"), _MODEL, "temperature"),
    (_Tensor("length_penalty", "FP32"), _MODEL, "len_penalty"),
    (_Tensor("repetition_penalty", "FP32"), _MODEL, "repetition_penalty"),
    (_Tensor("presence_penalty", "FP32"), _MODEL, "presence_penalty"),
    (_Tensor("frequency_penalty", "FP32"), _MODEL, "frequency_penalty"),
    (_Tensor("min_tokens", "INT32"), _MODEL, "min_tokens"),
    (_Tensor("seed", "UINT64"), _MODEL, "seed"),
    (_Tensor("beam_width", "INT32"), _MODEL, "beam_width"),
    (_Tensor("num_return_sequences", "INT32"), _MODEL, "num_return_sequences"),
    (_Tensor("stream", "BOOL"), _MODEL, "streaming"),
    (_Tensor("exclude_input_in_output", "BOOL"), _MODEL, "exclude_input_in_output"),
    (_Tensor("return_log_probs", "BOOL"), _MODEL, "return_log_probs"),
    (_Tensor("return_context_logits", "BOOL"), _MODEL, "return_context_logits"),
    (_Tensor("return_generation_logits", "BOOL"), _MODEL, "return_generation_logits"),
    (_Tensor("return_perf_metrics", "BOOL"), _MODEL, "return_perf_metrics"),
    (_Tensor("return_num_input_tokens", "BOOL"), _MODEL, "return_num_input_tokens"),
    (_Tensor("return_num_output_tokens", "BOOL"), _MODEL, "return_num_output_tokens"),
    (_Tensor("lora_task_id", "UINT64"), _MODEL, "lora_task_id"),
    (_Tensor("guided_decoding_guide_type", "STRING"), _MODEL, "guided_decoding_guide_type"),
    (_Tensor("guided_decoding_guide", "STRING"), _MODEL, "guided_decoding_guide"),
)
"""Inputs of the ensemble: (tensor, step that receives it, its name there)."""
_ENSEMBLE_OUTPUTS = (
    (_Tensor("text_output", "STRING", "-1"), ""),
    (_Tensor("finish_reason", "STRING"), "finish_reason"),
    (_Tensor("cum_log_probs", "FP32"), "cum_log_probs"),
    (_Tensor("output_log_probs", "FP32", "-1"), "output_log_probs"),
    (_Tensor("num_input_tokens", "INT32"), "num_input_tokens"),
    (_Tensor("num_output_tokens", "INT32"), "num_output_tokens"),
)
"""Outputs of the ensemble: (tensor, the model's output it comes from); the text comes from postprocessing."""
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
    inputs = {
        step: {inner: each.name for each, receiver, inner in _ENSEMBLE_INPUTS if receiver == step}
        for step in (_PREPROCESSING, _MODEL)
    }
    yield names.preprocessing, inputs[_PREPROCESSING], {key: tensor for key, (tensor, _) in _MODEL_INPUTS.items()}
    model_inputs = {inner: tensor for tensor, inner in _MODEL_INPUTS.values()} | inputs[_MODEL]
    model_outputs = {output: tensor for output, (tensor, _) in _MODEL_OUTPUTS.items()}
    model_outputs |= {output: each.name for each, output in _ENSEMBLE_OUTPUTS if output}
    yield names.model, model_inputs, model_outputs
    yield (
        names.postprocessing,
        {inner: tensor for tensor, inner in _MODEL_OUTPUTS.values()},
        {_TEXT.name: "text_output"},
    )


def _step(model: str, inputs: TensorMap, outputs: TensorMap) -> str:
    lines = [f'model_name: "{model}"', "model_version: -1"]
    lines += [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    lines += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    body = "\n".join(f"      {line}" for line in lines)
    return f"    {{\n{body}\n    }}"


def _tensors(kind: str, tensors: Iterable[_Tensor]) -> str:
    optional = {"input": " optional: true", "output": ""}[kind]
    lines = [
        f'  {{ name: "{each.name}" data_type: TYPE_{each.data_type} dims: [ {each.dims} ]'
        f"{optional if each.is_optional else ''} }}"
        for each in tensors
    ]
    return f"{kind} [\n" + ",\n".join(lines) + "\n]"


def _parameters(parameters: Mapping[str, str]) -> Iterable[str]:
    return (f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items())


def _config(*lines: str) -> str:
    return "# Made by `sluice build`.\n" + "\n".join(lines) + "\n"
