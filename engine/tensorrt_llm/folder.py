"""What a model folder tells before TensorRT-LLM has loaded it: vocabulary, ends, context."""

from dataclasses import dataclass
from pathlib import Path

from engine.runtimes import ModelFormat


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A HuggingFace checkpoint, a converted checkpoint or a compiled engine."""

    path: Path
    format: ModelFormat
    model_type: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Of generation_config.json, else of config.json; the first is TensorRT-LLM's end_id."""
    max_model_len: int
    """What the model was made for, or the engine compiled for."""
    quantization: str = "none"
    build_config: dict[str, object] | None = None
    """Of a compiled engine: its limits (max_batch_size, max_num_tokens, max_input_len, max_seq_len, max_beam_width)."""


def read_folder(path: Path) -> ModelFolder:
    """Raises SluiceError INVALID or NOT_FOUND with what is missing or cannot be read."""
    raise NotImplementedError
