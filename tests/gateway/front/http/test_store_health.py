"""`/health` says which store cannot be used, without its path, until it can be used again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.responses import ResponsesOptions
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    config = ServeConfig(responses=ResponsesOptions(store=str(folder / "responses.sqlite")))
    with live_server(config) as running:
        yield running


def degraded(live: LiveServer) -> list[str]:
    answer = live.get("/health")
    assert answer.status_code == 200
    found: list[str] = answer.json().get("degraded", [])
    return found


def stores_response(live: LiveServer) -> bool:
    made = live.post("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 16}).json()
    return live.get(f"/v1/responses/{made['id']}").status_code == 200


def stores_file(live: LiveServer) -> bool:
    files = {"file": ("a.jsonl", b"{}")}
    return live.request("POST", "/v1/files", files=files, data={"purpose": "batch"}).status_code == 200


@pytest.mark.parametrize(
    ("use", "find", "said"),
    [
        (
            stores_response,
            lambda live, folder: folder / "responses.sqlite",
            "--responses-store responses.sqlite cannot",
        ),
        (stores_file, lambda live, folder: live.batches.store.folder / "files", "the file cannot be stored: "),
    ],
)
def test_a_store_that_cannot_be_used_is_named_until_it_can(
    live: LiveServer, folder: Path, use: Callable[[LiveServer], bool], find: Callable[..., Path], said: str
) -> None:
    path = find(live, folder)
    path.write_text("of another program")
    assert not use(live)
    [problem] = degraded(live)
    assert problem.startswith(said) and "/" not in problem
    path.unlink()
    wait_until(lambda: not degraded(live))  # nobody else uses the store meanwhile
    assert use(live)


def test_strangers_see_no_paths(live: LiveServer) -> None:
    problems = ["the ledger '/tmp/a b/ledger.sqlite' cannot be used"]
    live.server.rooms.join(notice=lambda: "".join(problems))
    assert degraded(live) == ["the ledger 'ledger.sqlite' cannot be used"]
    assert live.get("/ping").json()["degraded"] == ["the ledger 'ledger.sqlite' cannot be used"]
    problems.clear()
