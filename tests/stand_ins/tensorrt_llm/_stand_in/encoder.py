"""Encoding: one forward pass of a batch, on the caller's thread."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from .inputs import record_batch
from .limits import ModelFolder
from .settings import settings


@dataclass
class EncoderOutput:
    """The output of a model for one prompt: [num_classes], [hidden_size] or [seq_len, num_labels] by the model."""

    logits: Any
    prompt_token_ids: list[int]
    prompt: str | None = None


class Encoder:
    """A model in encode-only mode. Its numbers are hashes of a text's tokens and their types."""

    def __init__(self, args: Any, folder: ModelFolder, max_seq_len: int) -> None:
        if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
            raise ValueError("encode_only=True runs on a single GPU")
        config = json.loads((folder.path / "config.json").read_text()) | (args.model_kwargs or {})
        architecture = config["architectures"][0]
        self._is_normalized = architecture.endswith("ForTextEmbedding")
        if self._is_normalized:
            self._size = config["hidden_size"]
        elif architecture.endswith("ForSequenceClassification"):
            self._size = config.get("num_labels") or len(config.get("id2label", (0, 1)))
        else:
            self._size = folder.vocab_size
        self._max_seq_len = max_seq_len
        self._max_batch_size = args.max_batch_size or 2048
        self._max_num_tokens = args.max_num_tokens or 8192
        self._busy = threading.Lock()

    def encode(self, inputs: Any, model_kwargs: dict[str, Any]) -> Any:
        """Raises ValueError for a batch over a limit, and RuntimeError as torch does in a forward pass."""
        is_one = not isinstance(inputs, list) or isinstance(inputs[0], int)
        prompts: list[list[int]] = [_ids(each) for each in ([inputs] if is_one else inputs)]
        lengths = [len(each) for each in prompts]
        if len(prompts) > self._max_batch_size:
            raise ValueError(f"Batch size ({len(prompts)}) exceeds max_batch_size ({self._max_batch_size}).")
        if sum(lengths) > self._max_num_tokens:
            raise ValueError(f"Total tokens ({sum(lengths)}) exceeds max_num_tokens ({self._max_num_tokens}).")
        if max(lengths) > self._max_seq_len:
            raise ValueError(f"Max sequence length ({max(lengths)}) exceeds max_seq_len ({self._max_seq_len}).")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two forward passes share the input buffers")
        try:
            return self._forward(prompts, lengths, model_kwargs)
        finally:
            self._busy.release()

    def _forward(self, prompts: list[list[int]], lengths: list[int], model_kwargs: dict[str, Any]) -> Any:
        types = np.asarray(model_kwargs.get("token_type_ids", np.zeros(sum(lengths), np.int32)))
        if types.shape != (sum(lengths),):
            raise AssertionError(f"Shapes are not the same! token_type_ids.shape={types.shape}")
        record_batch(prompts, types.tolist())
        time.sleep(settings().step_s)
        if settings().claims("cuda_error"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        token = settings().fault("error_on_token")
        if token is not None and any(int(token) in each for each in prompts):
            raise RuntimeError(f"a fault was asked for: token {token} is in the batch")
        parts = np.split(types, np.cumsum(lengths)[:-1])
        return [EncoderOutput(self._numbers(ids, part), ids) for ids, part in zip(prompts, parts, strict=True)]

    def _numbers(self, ids: Sequence[int], types: Any) -> Any:
        numbers = echo_vector(ids, types.tolist(), self._size)
        if self._is_normalized:
            numbers /= np.linalg.norm(numbers)
        torch = import_module("torch")
        return torch.tensor(numbers.tolist(), dtype=torch.float32)


def echo_vector(ids: Sequence[int], types: Sequence[int], size: int) -> Any:
    """Return numbers from -1 to 1, of which each depends on every token, its place and its type."""
    places = np.arange(1, len(ids) + 1)
    seed = int(np.sum(places * (np.asarray(ids) + 7 + 4099 * np.asarray(types))))
    return np.random.default_rng(seed).uniform(-1, 1, size).astype(np.float32)


def _ids(given: Any) -> list[int]:
    found = given["prompt_token_ids"] if isinstance(given, dict) else given
    if not isinstance(found, list):
        raise TypeError(f"Unsupported input type: {type(given)}")
    return found
