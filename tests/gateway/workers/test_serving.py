"""A real server with two HTTP workers answers its clients."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import onnx
import openai
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from sluice.cli.keys.command import command as keys_command
from tests.gateway.workers.servers import PROMPT, WORKERS, count, fetch_metrics
from tests.server_process import MODEL, ServerProcess, StartServer, running_bundled, running_command, running_server
from tests.serving.backends.onnxruntime.parts import one_op
from tests.serving.repository.small_models import write_python
from tests.waiting import PATIENCE_S, until, wait_until


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with running_server(checkpoint, tmp_path_factory.mktemp("workers") / "log", WORKERS) as running:
        running.wait_ready()
        yield running


def test_answers_equal_those_of_one_process(shared: ServerProcess, server: ServerProcess) -> None:
    messages: Any = [{"role": "user", "content": "Tell me of rivers."}]
    fixed: Any = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}

    def client_of(to: ServerProcess) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{to.base_url}/v1", api_key="none")

    with client_of(server) as client:
        expected = client.chat.completions.create(**fixed)
    for _ in range(4):
        with client_of(shared) as client:
            answer = client.chat.completions.create(**fixed)
            text = "".join(
                each.choices[0].delta.content or "" for each in client.chat.completions.create(**fixed, stream=True)
            )
        assert answer.choices == expected.choices
        assert answer.usage == expected.usage
        assert text == expected.choices[0].message.content


def answer_alone(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response | None:
    """Return a worker's own answer, while the host does not run; None where it would need the host."""
    host = psutil.Process(server.pid)
    host.suspend()
    try:
        return httpx.post(f"{server.base_url}{path}", json=body, timeout=3)  # on a connection of its own
    except httpx.ReadTimeout:
        return None
    finally:
        host.resume()


def test_workers_generate_without_the_host(shared: ServerProcess) -> None:
    for _ in range(8):  # so that both workers have some
        answer = answer_alone(shared, "/v1/completions", PROMPT)
        assert answer is not None
        assert answer.status_code == 200
    assert answer_alone(shared, "/v1/files", {}) is None
    assert httpx.get(f"{shared.base_url}/v1/models", timeout=PATIENCE_S).status_code == 200


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all that `sluice serve` serves by itself."""
    folder = tmp_path_factory.mktemp("bundled")
    with running_bundled(folder / "log", WORKERS, f"--rag-store={folder / 'rag.sqlite'}") as running:
        running.wait_ready()
        wait_until(lambda: "documentation read" in running.log)  # meanwhile the host answers questions to documents
        yield running


_QUESTION = {"messages": [{"role": "user", "content": "What is a worker?"}], "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "rag_pipeline", **_QUESTION}),
        ("/v1/chat/completions", {"model": "rag_pipeline", "stream": True, **_QUESTION}),
        ("/v1/rag/sluice/query", {"question": "What is a worker?", "max_tokens": 8, "temperature": 0}),
        ("/v1/rag/sluice/search", {"question": "What is a worker?"}),
        ("/v1/embeddings", {"model": "query_encoder", "input": "worker"}),
        ("/v2/models/rill/generate", {"text_input": "Once", "max_tokens": 8, "temperature": 0}),
        ("/v2/models/rill/generate_stream", {"text_input": "Once", "max_tokens": 8, "temperature": 0}),
        (
            "/v2/models/query_encoder/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["worker"]}]},
        ),
    ],
)
def test_workers_answer_for_all_models_without_the_host(
    bundled: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    alone = wait_until(lambda: answer_alone(bundled, path, body))
    through_host = httpx.post(
        f"{bundled.base_url}{path}", json=body, headers={"idempotency-key": os.urandom(8).hex()}, timeout=PATIENCE_S
    )
    assert alone.status_code == through_host.status_code == 200
    assert len(alone.content) > 50


_ENSEMBLE = """
platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
ensemble_scheduling { step [ { model_name: "changing" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""


def test_a_model_is_loaded_replaced_and_unloaded_for_all_workers(tmp_path: Path) -> None:
    models, names = tmp_path / "models", ("changing", "chain", "kept")
    for name in names[:2]:
        (models / name / "1").mkdir(parents=True)
    (models / "chain" / "config.pbtxt").write_text(_ENSEMBLE)
    onnx.save(one_op("Neg"), models / "changing" / "1" / "model.onnx")
    write_python(models / "kept", ("x", "FP32 [ 2 ]"), ("y", "FP32 [ 2 ]"), "given", 8)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, -2.0]}]}
    arguments = (
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--trace-config=triton,file={tmp_path / 'traces'}",
    )
    with running_command(tmp_path / "log", *arguments, WORKERS) as server:
        server.wait_ready()

        def infer(name: str) -> list[Any]:
            """Ask on connections of their own, so that both workers and maybe the host are asked."""
            answers = [
                httpx.post(f"{server.base_url}/v2/models/{name}/infer", json=body, timeout=PATIENCE_S) for _ in range(6)
            ]
            return [each.json()["outputs"][0]["data"] if each.is_success else each.status_code for each in answers]

        def change(name: str, action: str) -> None:
            httpx.post(f"{server.base_url}/v2/repository/models/{name}/{action}", timeout=PATIENCE_S).raise_for_status()

        assert [infer(each) for each in names] == [[[-1.0, 2.0]] * 6, [[-1.0, 2.0]] * 6, [[1.0, -2.0]] * 6]
        assert answer_alone(server, "/v2/models/chain/infer", body) is not None
        assert answer_alone(server, "/v2/models/kept/infer", body) is None
        rows = httpx.get(f"{server.base_url}/v2/models/changing/stats", timeout=PATIENCE_S).json()["model_stats"]
        assert rows[0]["inference_count"] == 13
        assert rows[0]["batch_stats"][0]["compute_infer"]["count"] == rows[0]["execution_count"]
        onnx.save(one_op("Abs"), models / "changing" / "1" / "model.onnx")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "all 2 HTTP workers are replaced" in server.log)
        assert infer("changing") == infer("chain") == [[-1.0, 2.0]] * 6  # the host has not loaded the other file
        change("changing", "load")
        assert infer("changing") == infer("chain") == [[1.0, 2.0]] * 6
        change("changing", "unload")
        assert infer("changing") == infer("chain") == [404] * 6
        change("chain", "load")
        assert infer("chain") == [[1.0, 2.0]] * 6
        wait_until(lambda: answer_alone(server, "/v2/models/chain/infer", body))
        traced = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        httpx.post(f"{server.base_url}/v2/trace/setting", json=traced, timeout=PATIENCE_S).raise_for_status()
        assert answer_alone(server, "/v2/models/chain/infer", body) is None


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", f"/v2/models/{MODEL}", None),
        ("GET", "/nowhere", None),
        ("POST", f"/v2/models/{MODEL}/generate", {"text_input": "Once", "max_tokens": 4, "ignore_eos": True}),
        ("POST", "/v1/completions", {"model": "other", "prompt": "Once"}),
        ("POST", "/v1/completions", {"prompt": "Once"}),
        ("POST", "/v1/completions", {**PROMPT, "max_tokens": -1}),
        ("POST", "/v1/completions", {**PROMPT, "user": "x" * (1 << 20)}),
        ("POST", "/v1/embeddings", {"model": MODEL, "input": "Once"}),
        ("POST", "/v1/messages", {**PROMPT, "prompt": None, "messages": [{"role": "user", "content": "Hello"}]}),
        (
            "POST",
            "/api/generate",
            {"model": MODEL, "prompt": "Once", "stream": False, "options": {"num_predict": 3, "temperature": 0}},
        ),
        ("OPTIONS", "/v1/models", None),
        ("POST", "/private/reserve", {"worker": 1}),
    ],
)
def test_every_route_answers_as_in_one_process(
    shared: ServerProcess, server: ServerProcess, method: str, path: str, body: dict[str, Any] | None
) -> None:
    def ask(of: ServerProcess) -> tuple[int, set[str], Any]:
        answer = httpx.request(method, f"{of.base_url}{path}", json=body, timeout=PATIENCE_S)
        names = {name for name in answer.headers if name != "connection"}
        return answer.status_code, names, _steady(answer.json()) if answer.content else None

    assert ask(shared) == ask(server)


def _steady(answer: Any) -> Any:
    """The answer without what differs between two requests."""
    if isinstance(answer, dict):
        changing = {"id", "created", "created_at", "system_fingerprint"}
        return {
            name: _steady(value)
            for name, value in answer.items()
            if name not in changing and not name.endswith("_duration")
        }
    return [_steady(each) for each in answer] if isinstance(answer, list) else answer


def test_garbage_is_refused_in_the_protocols_shape(shared: ServerProcess) -> None:
    answer = httpx.post(f"{shared.base_url}/v1/completions", content=b"{", timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


async def test_a_forwarded_stream_ends_with_its_client(shared: ServerProcess) -> None:
    body = {**PROMPT, "max_tokens": 30_000, "stream": True, "user": "x" * (1 << 20)}
    async with (
        httpx.AsyncClient(base_url=shared.base_url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
        await until(lambda: count(shared, "sluice_sequences_running") == 1)
    await until(lambda: count(shared, "sluice_sequences_running") == 0)


async def test_a_large_body_and_a_large_answer_pass_the_host(shared: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=shared.base_url, timeout=PATIENCE_S) as client:
        content = os.urandom(8 << 20)
        file = (await client.post("/v1/files", files={"file": content}, data={"purpose": "user_data"})).json()
        assert file["bytes"] == len(content)
        assert (await client.get(f"/v1/files/{file['id']}/content")).content == content


async def test_metrics_are_sums(shared: ServerProcess) -> None:
    names = (
        f'sluice_requests_total{{model="{MODEL}",outcome="ok",protocol="openai_completions"}}',
        f'sluice_generation_tokens_total{{model="{MODEL}"}}',
        f'sluice_time_to_first_token_seconds_count{{model="{MODEL}"}}',
        f'sluice_time_to_first_token_seconds_bucket{{le="+Inf",model="{MODEL}"}}',
        "sluice_http_workers",
    )

    def read() -> list[float]:
        page = fetch_metrics(shared)
        return [page.get(name, 0) for name in names]

    before, earlier = read(), None
    while before != earlier:  # a busy worker may be late for a scrape, with requests of an earlier test
        await asyncio.sleep(1.0)
        before, earlier = read(), before
    async with httpx.AsyncClient(base_url=shared.base_url, timeout=PATIENCE_S) as client:
        for _ in range(10):
            (await client.post("/v1/completions", json=PROMPT)).raise_for_status()
    expected = [count + more for count, more in zip(before, (10, 160, 10, 10, 0), strict=True)]
    await until(lambda: read() == expected)
    assert before[-1] == 2


def test_the_openmetrics_page_of_all_workers_is_valid(shared: ServerProcess) -> None:
    accept = {"accept": "application/openmetrics-text;version=1.0.0"}
    page = httpx.get(shared.metrics_url, headers=accept, timeout=PATIENCE_S)
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    names = {each.name for each in text_string_to_metric_families(page.text)}  # type: ignore[no-untyped-call]
    assert {"sluice_requests", "sluice_http_workers", "nv_inference_count"} <= names


def test_timelines_of_workers_are_found_by_whoever_is_asked(shared: ServerProcess) -> None:
    for number in range(6):
        with shared.client(headers={"x-request-id": f"timed-{number}"}) as client:
            assert client.post("/v1/completions", json=PROMPT).status_code == 200
    with shared.client() as client:
        found = [client.get(f"/v1/requests/timed-{number}/timeline") for number in range(6)]
        listed = client.get("/v1/requests").json()["data"]
    assert [each.json()["id"] for each in found] == [f"timed-{number}" for number in range(6)]
    assert {f"timed-{number}" for number in range(6)} <= {each["id"] for each in listed}


def test_a_session_whose_requests_went_to_several_workers_is_shown_once(shared: ServerProcess) -> None:
    for _ in range(6):  # each over a connection of its own
        with shared.client(headers={"x-session-id": "of both", "x-parent-session-id": "its parent"}) as client:
            assert client.post("/v1/completions", json=PROMPT).status_code == 200
    with shared.client() as client:
        sample = client.get("/v1/admin/live", params={"once": "true", "interval_secs": 0.25}).json()
    found = [(each["parent"], each["num_turns"]) for each in sample["sessions"] if each["name"] == "of both"]
    assert found == [("its parent", 6)]


async def test_open_requests_of_workers_are_listed_and_cancelled(shared: ServerProcess) -> None:
    body = {**PROMPT, "max_tokens": 30_000, "stream": True}
    async with httpx.AsyncClient(base_url=shared.base_url, timeout=PATIENCE_S) as client:
        streams = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
        rows: list[dict[str, Any]] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(rows) < 4 or any(each["state"] == "waiting" for each in rows):
                rows = (await client.get("/v1/admin/requests")).json()["data"]
        assert {each["worker"] for each in rows} <= {1, 2}
        for each in rows:
            answer = await client.post(f"/v1/admin/requests/{each['id']}/cancel")
            assert answer.json()["num_cancelled"] == 1
        ends = [each.text for each in await asyncio.gather(*streams)]
    assert all("the request was cancelled by an administrator" in each for each in ends)


async def test_limits_hold_over_all_workers_and_every_request_is_in_the_ledger(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = f"--state-path={tmp_path / 'state'}"

    async def make_key(*arguments: str) -> dict[str, str]:
        assert await asyncio.to_thread(keys_command, ["create", *arguments, "--quiet", state]) == 0
        return {"authorization": f"Bearer {capsys.readouterr().out.strip()}"}

    admin, limited = (
        await make_key("--name=admin", "--groups=admin"),
        await make_key("--name=few", "--requests-per-minute=7"),
    )
    frugal = await make_key("--name=frugal", f"--tokens-per-day={3 * 17 + 5}")
    server = await asyncio.to_thread(start_server, WORKERS, state)

    async def ask(headers: dict[str, str]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S) as client:
            return await client.post("/v1/completions", json={**PROMPT, "prompt": [5]}, headers=headers)

    answers = await asyncio.gather(*(ask(limited) for _ in range(20)))
    assert sorted(each.status_code for each in answers) == [200] * 7 + [429] * 13
    assert {each.headers["x-ratelimit-limit-requests"] for each in answers} == {"7"}
    assert all(int(each.headers["retry-after"]) <= 60 for each in answers if each.status_code == 429)
    answers = await asyncio.gather(*(ask(frugal) for _ in range(6)))
    assert sorted(each.status_code for each in answers) == [200] * 3 + [429] * 3
    assert (await ask({})).status_code == 401

    async with httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S, headers=admin) as client:

        async def totals() -> tuple[int, int]:
            rows = (await client.get("/v1/usage", params={"by": "key"})).json()["data"]
            return sum(each["requests"] for each in rows), sum(each["generated_tokens"] for each in rows)

        async with asyncio.timeout(PATIENCE_S):
            while await totals() != (13, 160):  # the rows come within a second; those three refused for tokens have one
                await asyncio.sleep(0.1)
    assert await asyncio.to_thread(keys_command, ["revoke", "few", "--yes", state]) == 0
    await asyncio.sleep(2)
    assert [(await ask(limited)).status_code for _ in range(4)] == [401] * 4
    assert json.dumps(limited) not in server.log


def test_a_websocket_through_a_worker_is_the_hosts_and_ends_with_it(checkpoint: Path, tmp_path: Path) -> None:
    event = {"type": "response.create", "model": MODEL, "input": "Hello", "store": False}
    with running_server(checkpoint, tmp_path / "log", WORKERS) as server:
        server.wait_ready()
        with connect(f"ws{server.base_url.removeprefix('http')}/v1/responses") as socket:
            previous = None
            for num_tokens in (4, 8):
                asked = {**event, "max_output_tokens": num_tokens, "previous_response_id": previous}
                socket.send(json.dumps(asked))
                while (last := json.loads(socket.recv(PATIENCE_S)))["type"] != "response.incomplete":
                    assert last["type"] != "error", last
                previous = last["response"]["id"]
                assert last["response"]["usage"]["output_tokens"] == num_tokens
            os.kill(server.pid, signal.SIGTERM)
            with pytest.raises(ConnectionClosedError) as closed:
                socket.recv(PATIENCE_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
