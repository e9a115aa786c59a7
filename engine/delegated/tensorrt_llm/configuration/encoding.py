"""Models that are served for vectors or scores, and the arguments with which TensorRT-LLM encodes."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sluice.engine.config import Speculation, Task
from sluice.engine.delegated.tensorrt_llm.configuration.arguments import Precedence, Resolution
from sluice.engine.delegated.tensorrt_llm.configuration.limits import RANKS
from sluice.engine.model_folder import SENTENCE_TRANSFORMERS, read_json, served_task
from sluice.errors import ErrorCode, SluiceError

EMBEDDERS = {"Qwen3ForCausalLM": "Qwen3ForTextEmbedding"}
"""Its classes that give the vector of a text, by the architecture that the checkpoint names."""
SCORERS = frozenset({"BertForSequenceClassification"})
_GENERATES = "give --task generate, or serve it with --runtime vllm"
_ENCODES = "encode_only"
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


class Encoder(NamedTuple):
    """A model that encodes."""

    task: Task
    architecture: str
    """TensorRT-LLM's class, which may be another than the checkpoint names."""
    size: int
    """How many numbers a text gives."""
    has_token_types: bool = False
    is_logit: bool = False
    """Whether a score is a logit, of which the sigmoid is wanted."""


def find_encoder(folder: Path, task: Task) -> Encoder:
    """Read what a checkpoint gives. Raises UNIMPLEMENTED for a model that TensorRT-LLM does not encode with: that of
    any other decoder would be the logits of a next token."""
    config = read_json(folder / "config.json")
    named = next(iter(config.get("architectures") or ()), "no architecture")
    if task is Task.EMBED:
        if named not in (*EMBEDDERS, *EMBEDDERS.values()):
            raise _unsupported(f"embeds with {', '.join(EMBEDDERS)}, and {folder} is {named}; {_GENERATES}")
        _check_parts(folder)
        return Encoder(task, EMBEDDERS.get(named, named), int(config.get("hidden_size", 0)))
    if named not in SCORERS:
        raise _unsupported(f"scores with {', '.join(SCORERS)}, and {folder} is {named}; {_GENERATES}")
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise _unsupported(f"scores with a model of one label, and {folder} has {labels}; serve it as a classifier")
    return Encoder(task, named, 1, config.get("type_vocab_size", 0) > 1, _is_logit(folder, config))


def _check_parts(folder: Path) -> None:
    """Raise UNIMPLEMENTED for parts of a sentence-transformers model that TensorRT-LLM would leave out."""
    if not (folder / SENTENCE_TRANSFORMERS).is_file():
        return
    listed = msgspec.json.decode((folder / SENTENCE_TRANSFORMERS).read_bytes(), type=list[dict[str, Any]])
    parts = {str(each.get("type")).rpartition(".")[2]: folder / str(each.get("path")) for each in listed}
    if unknown := parts.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise _unsupported(f"embeds without the part {min(unknown)} that {folder} has; {_GENERATES}")
    pooling = read_json(parts["Pooling"] / "config.json") if "Pooling" in parts else {}
    if pooling and not (pooling.get("pooling_mode_lasttoken") or pooling.get("pooling_mode") == "lasttoken"):
        raise _unsupported(f"pools by the last token, and {parts['Pooling']} asks for another way; {_GENERATES}")


def _is_logit(folder: Path, config: dict[str, Any]) -> bool:
    own = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = str(own or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _unsupported(f"scores with the activation {' or '.join(_ACTIVATIONS)}, and {folder} asks for {name}")
    return _ACTIVATIONS[name]


def resolve_encoder(resolution: Resolution) -> Encoder | None:
    """Complete the arguments of a model that encodes; None for one that generates. One step holds the longest text,
    since no text is encoded in pieces. Raises SluiceError for what is for generation, and for several GPUs."""
    config, arguments = resolution.config, resolution.arguments
    task = served_task(config)
    if task not in (Task.EMBED, Task.SCORE):
        if arguments.get(_ENCODES):
            raise arguments.refusal(_ENCODES, "must be left out: --task embed and --task score set it")
        return None
    encoder = find_encoder(resolution.folder.path, task)
    if config.lora_modules or config.speculation is not Speculation.OFF:
        name = "lora_modules" if config.lora_modules else "speculation"
        raise _unsupported(f"has {name} for generation alone, and this model is served for {task}; leave it out", name)
    for name in RANKS:
        if (size := arguments.get(name, 1)) not in (None, 1):
            raise arguments.refusal(name, f"must be 1 for {task}, got {size}: TensorRT-LLM encodes on one GPU")
    arguments.add(_ENCODES, True, "task", Precedence.GIVEN)
    if task is Task.EMBED:
        arguments.add_default("model_kwargs", {"architectures": [encoder.architecture]}, "task")
    arguments.add_default("guided_decoding_backend", None)
    longest = int(arguments.get("max_seq_len") or resolution.folder.max_model_len)
    if arguments.whole_number("max_num_tokens") < longest:
        arguments.replace("max_num_tokens", longest)
    return encoder


def _unsupported(what: str, param: str = "task") -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, f"TensorRT-LLM {what}", param=param)
