"""`sluice smoke` against a server as it is deployed, and against one whose answers something in between spoils."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.cli.__main__ import main as sluice
from sluice.cli.smoke.command import command
from tests.cli.smoke.spoiler import Spoiler, spoil
from tests.ports import ReservedPort
from tests.server_process import ServerProcess, running_bundled

KEY = "sk-smoke-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("smoke")
    store = ("--rag-store", str(folder / "rag.sqlite"), "--state-path", str(folder / "state"))
    with running_bundled(folder / "log", "--api-key", KEY, *store) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def spoiler(server: ServerProcess) -> Iterator[Spoiler]:
    with spoil(server.base_url) as made:
        yield made


def smoke(server: ServerProcess, url: str = "", *options: str) -> list[str]:
    """The arguments. The server itself says where its gRPC and its metrics are."""
    return [url or server.base_url, "--api-key", KEY, *options]


def outcomes(printed: str) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in json.loads(printed)["checks"]}


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch, unused_url: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, unused_url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("dead_proxy")
def test_a_server_as_deployed_passes_with_no_proxy_between(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(smoke(server)) == 0
    printed = capsys.readouterr().out
    assert "17 ok, 0 skipped, 0 failed" in printed, printed
    with server.client(headers={"authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        names = [each["name"] for each in client.get("/v1/rag/collections").json()["data"]]
    assert not [name for name in names if name.startswith("smoke-")]


@pytest.mark.parametrize(
    ("path", "old", "new", "failing"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n", b"", "chat completions"),
        ("/v1/completions", b'"completion_tokens":12', b'"completion_tokens":13', "completions"),
        ("/v1/responses", b'"type":"response.completed"', b'"type":"response.failed"', "responses"),
        ("/v1/messages", b"event: message_stop", b"event: ping", "Anthropic messages"),
        ("/api/chat", b'"done":true', b'"done":false', "Ollama chat"),
        ("/v2/models/rill/generate_stream", b'"text_output":"', b'"text_output":"x', "v2 generate"),
        ("/v2/models/query_encoder/infer", b'"embeddings"', b'"vectors"', "v2 infer"),
        ("/v1/rag/smoke-", b"refunds.md", b"another.md", "retrieval"),
        ("/health", b'"status":"ok"', b'"status":"hangs"', "health"),
        ("/v1/no-such-route", b'"error"', b'"problem"', "bad input"),
        ("/v1/models", b'"data":[', b'"data":null,"x":[', "models"),
    ],
)
def test_what_is_spoiled_fails(
    server: ServerProcess,
    spoiler: Spoiler,
    capsys: pytest.CaptureFixture[str],
    path: str,
    old: bytes,
    new: bytes,
    failing: str,
) -> None:
    spoiler.replaced = (path, old, new)
    assert command(smoke(server, spoiler.url, "--json", "--model", "rill", "--only", failing)) == 1
    assert outcomes(capsys.readouterr().out)[failing] == "failed"


def test_grpc_at_another_address(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    grpc = ("--only", "gRPC", "--json", "--grpc")
    assert command(smoke(server, "", *grpc, server.grpc_address)) == 0
    assert set(outcomes(capsys.readouterr().out).values()) == {"ok"}
    assert command(smoke(server, "", *grpc, "none")) == 0
    assert outcomes(capsys.readouterr().out)["health over gRPC"] == "skipped"


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize(
    "words",
    [
        ["rag", "list", "--url"],
        ["logs"],
        ["usage", "--url"],
        ["profile", "--seconds", "0.1", "--output", "trace.json"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_asks_a_server_of_this_machine_through_a_proxy(
    server: ServerProcess,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sluice([*words, server.base_url, "--api-key", KEY]) == 0, capsys.readouterr()


def test_a_wrong_key_is_named(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*smoke(server)[:-1], "sk-other", "--only", "models"]) == 1
    assert "give a key with --api-key or SLUICE_API_KEY" in capsys.readouterr().out


def test_metrics_at_another_address(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(smoke(server, "", "--metrics", server.metrics_url, "--only", "metrics", "--json")) == 1
    # They were read, and have not moved, as nothing else was asked for.
    assert outcomes(capsys.readouterr().out) == {
        "models": "ok",
        "metrics can be read": "ok",
        "metrics have moved": "failed",
    }
    assert command(smoke(server, "", "--metrics", "none", "--only", "metrics", "--json")) == 0
    assert set(outcomes(capsys.readouterr().out).values()) == {"ok", "skipped"}


def test_an_unknown_model_is_named(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(smoke(server, "", "--model", "gpt-9", "--only", "models")) == 1
    assert "no model is named 'gpt-9'; there are: rill" in capsys.readouterr().out


def test_nobody_there(capsys: pytest.CaptureFixture[str], unused_url: str) -> None:
    assert command([unused_url, "--grpc", "none", "--metrics", "none", "--json", "--only", "health"]) == 1
    expected = {"health": "failed", "health over gRPC": "skipped", "models": "failed"}
    assert outcomes(capsys.readouterr().out) == expected


@pytest.fixture
def unused_url() -> Iterator[str]:
    """An address where nothing listens."""
    port = ReservedPort()
    yield f"http://127.0.0.1:{port.number}"
