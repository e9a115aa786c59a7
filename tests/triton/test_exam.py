"""Whole servers answer recorded questions like the real one. Protocols alone: tests/gateway/api/v2/test_recorded.py."""

from pathlib import Path

import pytest

from tests.server_process import ServerProcess
from tests.triton.compare import Verdict
from tests.triton.on_purpose import BY_CHANCE, IN_SAMPLE, NEWER, ON_PURPOSE
from tests.triton.records import read_exchanges
from tests.triton.replay import EXCHANGES, replay
from tests.triton.server import EXAM_FLAGS, MODELS, NOT_LOADED, copy_models, serving

SAMPLE = EXCHANGES.with_name("sample.jsonl")


def different_answers(server: ServerProcess, exchanges: Path) -> dict[str, tuple[str, ...]]:
    """Return the differences that a client would notice, by the exchange's name."""
    replayed = replay(read_exchanges(exchanges), server.base_url, server.grpc_address)
    return {answer.name: answer.reasons[:4] for answer in replayed if answer.verdict is Verdict.DIFFERS}


def test_the_sample_is_answered_as_recorded(triton: ServerProcess) -> None:
    different = different_answers(triton, SAMPLE)
    assert {name: reasons for name, reasons in different.items() if name not in NEWER | IN_SAMPLE} == {}


@pytest.mark.long
def test_only_the_named_answers_differ(tmp_path: Path) -> None:
    names = sorted(folder.name for folder in MODELS.iterdir())
    loads = [f"--load-model={name}" for name in names if name not in NOT_LOADED]
    with serving(copy_models(tmp_path / "models", names), tmp_path / "log", *EXAM_FLAGS, *loads) as server:
        different = different_answers(server, EXCHANGES)
    named = ON_PURPOSE.keys() | BY_CHANCE.keys() | NEWER
    assert {name: reasons for name, reasons in different.items() if name not in named} == {}
    assert ON_PURPOSE.keys() - different.keys() == set(), "these no longer differ"
