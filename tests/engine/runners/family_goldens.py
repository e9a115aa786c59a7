"""Outputs of transformers for a small model of each family, recorded by `make goldens`."""

import msgspec

from tests import paths
from tests.goldens.checkpoints import Blueprint

DATA = paths.DATA / "families"
NAMES = tuple(sorted(path.stem for path in DATA.glob("*.json")))


class Continuation(msgspec.Struct, frozen=True):
    """A prompt and its greedy continuation in float32, ended by `max_tokens` or an end-of-sequence token."""

    prompt_token_ids: list[int]
    max_tokens: int
    token_ids: list[int]


class FamilyGolden(msgspec.Struct, frozen=True):
    """`logits` are those of the middle and the last token of the last prompt."""

    blueprint: Blueprint
    max_model_len: int | None
    cases: list[Continuation]
    logits: list[list[float]]


def read_family(name: str) -> FamilyGolden:
    return msgspec.json.decode((DATA / f"{name}.json").read_bytes(), type=FamilyGolden)
