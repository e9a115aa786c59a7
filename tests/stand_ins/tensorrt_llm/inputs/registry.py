# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The input processors: of models of text, and of one that sees."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from .._stand_in.settings import settings
from ..llmapi.tokenizer import TokenizerBase, load_tokenizer
from .multimodal import MultimodalInput

SEEING = "seeing"
"""The model type of a model of text and images. An image takes a token for each 32 times 32 pixels begun."""
PLACEHOLDER = "<|image|>"
_PATCH = 32

Made = tuple[list[int], dict[str, Any] | None]


class MultimodalPlaceholderRegistry:
    def __init__(self, placeholders: Mapping[str, Mapping[str, str]]) -> None:
        self._placeholders = placeholders

    def is_valid(self, model_type: str, modality: str) -> bool:
        return modality in self._placeholders.get(model_type, {})

    def get_placeholder(self, model_type: str, modality: str) -> str:
        """Raises ValueError for a model type or a modality that it does not know."""
        if not self.is_valid(model_type, modality):
            raise ValueError(f"Model type '{model_type}' with modality '{modality}' is not registered.")
        return self._placeholders[model_type][modality]


MULTIMODAL_PLACEHOLDER_REGISTRY = MultimodalPlaceholderRegistry({SEEING: {"image": PLACEHOLDER}})


class DefaultInputProcessor:
    """Makes tokens of text."""

    def __init__(self, tokenizer: TokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.multimodal_hashing_supported: bool | None = None

    def __call__(self, inputs: Any, sampling_params: Any) -> Made:
        if self.tokenizer is None:
            raise ValueError("tokenizer is required to tokenize string prompt")
        return self.tokenizer.encode(inputs["prompt"], sampling_params.add_special_tokens), None


class SeeingInputProcessor:
    """Puts tokens beyond the vocabulary in the place of each placeholder. Two threads at once are an error."""

    supports_token_id_mm_expansion = settings().version == "1.4.0"
    """Whether it takes a prompt of tokens as it is. Otherwise that becomes text, and tokens again."""

    def __init__(self, folder: Path, vocab_size: int, tokenizer: TokenizerBase | None) -> None:
        self.tokenizer = load_tokenizer(tokenizer, folder)
        self.multimodal_hashing_supported: bool | None = None
        self._vocab_size = vocab_size
        self._busy = threading.Lock()

    def __call__(self, inputs: Any, sampling_params: Any) -> Made:
        assert self._busy.acquire(blocking=False), "the processor is used by two threads at once"
        try:
            if settings().fault("image_memory") is not None and inputs["multi_modal_data"]["image"][0].width > 1000:
                raise MemoryError("a fault was asked for")
            return self._make(inputs, sampling_params)
        finally:
            self._busy.release()

    def _make(self, inputs: Any, sampling_params: Any) -> Made:
        assert self.tokenizer is not None
        if "prompt" in inputs:
            token_ids = self.tokenizer.encode(inputs["prompt"], sampling_params.add_special_tokens)
        elif self.supports_token_id_mm_expansion:
            token_ids = inputs["prompt_token_ids"]
        else:
            text = self.tokenizer.decode(inputs["prompt_token_ids"])
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        images = list(inputs["multi_modal_data"]["image"])
        [placeholder] = self.tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
        if token_ids.count(placeholder) != len(images):
            raise ValueError(f"{token_ids.count(placeholder)} placeholders do not match {len(images)} images")
        lengths = iter([self.get_num_tokens_per_image(image=each) for each in images])
        whole: list[int] = []
        for token_id in token_ids:
            whole += [self._vocab_size + 1] * next(lengths) if token_id == placeholder else [token_id]
        pixels = [each.tobytes() for each in images]
        return whole, {"multimodal_data": {"image": {"pixel_values": pixels}}}

    def get_num_tokens_per_image(self, *, image: Image.Image) -> int:
        assert image.mode == "RGB"
        return -(-image.width // _PATCH) * -(-image.height // _PATCH)

    def positions(self, token_ids: list[int], lengths: list[int]) -> list[int]:
        seen = [place for place, token_id in enumerate(token_ids) if token_id > self._vocab_size]
        return [seen[sum(lengths[:number])] for number in range(len(lengths))]


def create_input_processor(model_path: str | Path, tokenizer: TokenizerBase | None) -> Any:
    folder = Path(model_path)
    told = json.loads((folder / "config.json").read_text())
    if told.get("model_type") != SEEING:
        return DefaultInputProcessor(tokenizer)
    return SeeingInputProcessor(folder, told["vocab_size"], tokenizer)


def create_input_processor_with_hash(input_processor: Any) -> Callable[[Any, Any], Made]:
    """Its first prompt decides for good whether the processor hashes, a faulty one too."""

    def hashed(inputs: Any, sampling_params: Any) -> Made:
        token_ids, extra = input_processor(inputs, sampling_params)
        if settings().fault("image_hashes") is not None:
            raise ValueError("a fault was asked for")
        images = inputs["multi_modal_data"]["image"]
        lengths = [input_processor.get_num_tokens_per_image(image=each) for each in images]
        hashes = [_hash(each) for each in extra["multimodal_data"]["image"]["pixel_values"]]
        positions = input_processor.positions(token_ids, lengths)
        return token_ids, {**extra, "multimodal_input": MultimodalInput(hashes, positions, lengths)}

    def process(inputs: Any, sampling_params: Any) -> Made:
        known = input_processor.multimodal_hashing_supported
        if known is False:
            made: Made = input_processor(inputs, sampling_params)
            return made
        try:
            made = hashed(inputs, sampling_params)
        except Exception:
            if known:
                raise
            input_processor.multimodal_hashing_supported = False
            return process(inputs, sampling_params)
        input_processor.multimodal_hashing_supported = True
        return made

    return process


def _hash(pixels: bytes) -> list[int]:
    digest = hashlib.sha256(pixels).digest()
    return [int.from_bytes(digest[start : start + 4], "big", signed=True) for start in range(0, 32, 4)]
