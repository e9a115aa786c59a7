"""Sluice answers the recorded questions like the real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ServerProcess
from tests.triton.compare import Verdict
from tests.triton.on_purpose import BY_CHANCE, IN_SAMPLE, NEWER, ON_PURPOSE
from tests.triton.records import read_exchanges
from tests.triton.replay import EXCHANGES, replay
from tests.triton.server import MODELS, copy_models, serving

SAMPLE = EXCHANGES.with_name("sample.jsonl")
NOT_LOADED = {"on_demand", "bad_load"}
FLAGS = (
    "--model-control-mode=explicit",
    "--allow-model-file-override=true",
    "--http-header-forward-pattern=x-fwd-.*",
    "--grpc-header-forward-pattern=x-fwd-.*",
    "--allow-client-shm=true",
)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server set up like the real one when its answers were recorded."""
    names = sorted(folder.name for folder in MODELS.iterdir())
    folder = tmp_path_factory.mktemp("examined")
    loads = [f"--load-model={name}" for name in names if name not in NOT_LOADED]
    with serving(copy_models(folder / "models", names), folder / "log", *FLAGS, *loads) as server:
        yield server


def different_answers(server: ServerProcess, exchanges: Path) -> dict[str, tuple[str, ...]]:
    """Return the differences that a client would notice, by the exchange's name."""
    replayed = replay(read_exchanges(exchanges), server.base_url, server.grpc_address)
    return {answer.name: answer.reasons[:4] for answer in replayed if answer.verdict is Verdict.DIFFERS}


def test_the_sample_is_answered_as_recorded(examined: ServerProcess) -> None:
    """This test runs first: the questions below leave a model that cannot be loaded."""
    different = different_answers(examined, SAMPLE)
    assert {name: reasons for name, reasons in different.items() if name not in NEWER | IN_SAMPLE} == {}


@pytest.mark.long
def test_only_the_named_answers_differ(examined: ServerProcess) -> None:
    different = different_answers(examined, EXCHANGES)
    named = ON_PURPOSE.keys() | BY_CHANCE.keys() | NEWER
    unexplained = {name: reasons for name, reasons in different.items() if name not in named}
    assert unexplained == {}
    assert ON_PURPOSE.keys() - different.keys() == set(), "these no longer differ"
