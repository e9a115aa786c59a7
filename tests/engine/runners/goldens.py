"""Outputs of transformers for the checkpoints under tests/data, recorded by `make goldens`."""

from pathlib import Path

import msgspec

from tests.paths import DATA

CHECKPOINTS = ("llama_tiny", "qwen3_tiny")


class Golden(msgspec.Struct, frozen=True):
    """A prompt and its greedy continuation in float32, ended by `max_tokens` or an end-of-sequence token."""

    prompt_token_ids: list[int]
    max_tokens: int
    repetition_penalty: float
    token_ids: list[int]
    margin: float


class Goldens(msgspec.Struct, frozen=True):
    cases: list[Golden]


def checkpoint_path(name: str) -> Path:
    return DATA / "checkpoints" / name


def read_goldens(name: str) -> list[Golden]:
    path = DATA / "goldens" / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Goldens).cases
