"""`sluice serve` as a process: how it starts, what its ports answer, and how it ends."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import tritonclient.grpc as triton

from sluice.gateway.front.listeners import listen
from sluice.gateway.lifecycle import SIGNAL_ECHO_S
from tests.server_process import ServerProcess, StartServer, running_command, serve_command, start_command
from tests.serving.backends.python.parts import TEXT, write_model
from tests.waiting import PATIENCE_S, wait_until

SOON_S = 60.0
"""Much less than EXIT_S, so that an end within it shows that nothing waited for a timeout."""
EXIT_S = "--exit-timeout-secs=600"


@contextmanager
def open_stream(client: httpx.Client, max_tokens: int) -> Iterator[Iterator[str]]:
    """Stream a completion's events, as the text after `data: `. The first one, of however many tokens, has arrived when
    this returns."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body["temperature"] = 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        events = (line.removeprefix("data: ") for line in lines if line)
        first = next(events)
        yield chain((first,), events)


def text_of(events: list[str]) -> str:
    """Return the text of a completion's events, between which comments keep the connection."""
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.base_url)
    return socket.create_connection((address.hostname, address.port), PATIENCE_S)


def metric(server: ServerProcess, name: str) -> float:
    """Return the sum of a metric over its labels."""
    lines = httpx.get(server.metrics_url).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def assert_gone(process: psutil.Process) -> None:
    _, alive = psutil.wait_procs([process], PATIENCE_S)
    assert not alive


# -- while it serves


def test_says_where_it_listens_and_when_it_is_ready(server: ServerProcess) -> None:
    where = f"metrics {server.metrics_url}, gRPC {server.grpc_address}"
    assert server.listening_line == f"Listening on {server.base_url} ({where})\n"
    assert server.ready_line.startswith("Sluice 0.1.0 serving tiny (llama, ")
    assert (
        f"OpenAI {server.base_url}/v1 - v2 {server.base_url}/v2 and gRPC {server.grpc_address} - " in server.ready_line
    )


def test_addresses_of_ipv6_can_be_copied_from_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    flags = ("--model-repository", str(tmp_path / "models"), "--host", "::1")
    with running_command(tmp_path / "log", *flags) as server:
        server.wait_ready()
        assert re.fullmatch(r"\[::1\]:\d+", server.grpc_address)
        assert f"gRPC {server.grpc_address} - " in server.ready_line
        assert httpx.get(f"{server.base_url}/v2/health/live").status_code == 200
        with triton.InferenceServerClient(server.grpc_address) as client:
            assert client.is_server_live()


def test_what_models_print_is_json_in_a_json_log_and_about_no_request(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                print("before the fault")
                import ctypes
                ctypes.string_at(0)
    """
    write_model(tmp_path / "models" / "printer", code)
    (tmp_path / "models" / "printer" / "config.pbtxt").write_text(f'backend: "python"{TEXT}')
    options = (f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit", "--log-format=json")
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    with running_command(tmp_path / "log", *options) as server, server.client() as client:
        server.wait_ready()
        load = client.post("/v2/repository/models/printer/load", headers={"x-request-id": "load-1"})
        assert load.status_code == 200, load.text
        assert client.post("/v2/models/printer/infer", json=body).status_code == 500
        wait_until(lambda: "starting another" in server.log)
        lines = [json.loads(line) for line in server.log.splitlines()]
        shown = client.get("/v1/admin/logs").json()["data"]
    printed = [line for line in lines if line["message"].startswith("[printer_0] ")]
    assert printed[0]["message"] == "[printer_0] before the fault"
    assert "Fatal Python error: Segmentation fault" in printed[1]["message"]
    lost = [line for line in lines if line["message"].endswith("starting another")]
    assert {line["request_id"] for line in (*printed, *lost)} == {"-"}
    assert [line["process"] for line in shown if line["message"] == printed[0]["message"]] == ["printer_0"]


def test_a_full_standard_output_and_a_low_soft_limit_of_files_do_not_stop_the_server(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    ports = ("--http-port=0", "--metrics-port=0")
    command = shlex.join(serve_command(*ports, "--model-repository", str(tmp_path / "models")))
    shell = f"ulimit -Sn 64; exec {command} > /dev/full"
    process = subprocess.Popen(["sh", "-c", shell], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(filter(None, (re.search(r"Listening on (\S+) ", line) for line in process.stderr)))
        assert httpx.get(f"{found[1]}/v2/health/live", timeout=PATIENCE_S).status_code == 200
        soft, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard > 64
    finally:
        process.kill()
        process.communicate()


def test_health_and_models(server: ServerProcess) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v2/health/ready").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        assert client.get("/openapi.json").json()["info"]["title"] == "Sluice"
        overview = client.get("/").json()
        assert (overview["ready"], overview["models"]) == (True, ["tiny"])
        assert overview["metrics"] == {"port": httpx.URL(server.metrics_url).port, "path": "/metrics"}


def test_metrics_show_the_work(server: ServerProcess) -> None:
    names = ("sluice_requests_total", "sluice_generation_tokens_total", "sluice_engine_generation_tokens_total")
    before = [metric(server, name) for name in names]
    with server.client() as client, open_stream(client, 20) as events:
        assert list(events)[-1] == "[DONE]"
    assert [metric(server, name) for name in names[:2]] == [before[0] + 1, before[1] + 20]
    assert metric(server, names[2]) >= before[2] + 20
    assert metric(server, "sluice_kv_blocks_free") > 0
    assert metric(server, "sluice_ready") == metric(server, "sluice_live") == 1
    assert metric(server, "sluice_http_responses_total") > 0


def test_the_metrics_port_takes_no_body_for_a_request(server: ServerProcess) -> None:
    url = httpx.URL(server.metrics_url)
    inner = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    wish = b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n" % len(inner)
    with socket.create_connection((url.host, url.port), 30.0) as client:
        client.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\n" + wish + b"\r\n")
        answer = client.recv(65536)
        client.sendall(inner)
        client.sendall(b"GET /no HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer += b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 404 ") == answer.count(b"HTTP/1.1 ") == 2


def test_the_metrics_port_serves_nothing_else(server: ServerProcess) -> None:
    assert httpx.post(server.metrics_url).status_code == 405
    assert httpx.get(server.metrics_url.replace("/metrics", "/v1/models")).status_code == 404
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert httpx.get(server.metrics_url, headers=accept).text.endswith("# EOF\n")


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess) -> None:
    with server.client() as client, open_stream(client, 30_000):
        wait_until(lambda: metric(server, "sluice_sequences_running") == 1)
        assert metric(server, "sluice_kv_blocks_reserved") > 900
    wait_until(lambda: metric(server, "sluice_sequences_running") == 0)
    assert metric(server, "sluice_kv_blocks_reserved") == metric(server, "sluice_kv_blocks_used") == 0


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 500, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 200_000, b"\r\n"])
def test_garbage_on_any_port_harms_nobody(server: ServerProcess, garbage: bytes) -> None:
    for url in (server.base_url, server.metrics_url):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), PATIENCE_S) as client:
            client.sendall(garbage)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"x-request-id": "two words"}).headers["x-request-id"] != "two words"
    assert httpx.get(server.metrics_url + "?name[]=%ff").status_code == 200
    assert "Traceback" not in server.log


# -- how it ends


def test_sigterm_lets_streams_finish_and_nothing_else_delays_it(start_server: StartServer) -> None:
    server = start_server(EXIT_S)
    engine = server.engine()
    with server.client() as client, open_stream(client, 120) as events, connect(server) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(1)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)  # in the same moment: supervisors tell a process and its group
        with idle.makefile("rb") as answer:
            assert answer.read().endswith(b'{"status":"ok"}'), "the idle connection is closed"
        with pytest.raises(ConnectionRefusedError):
            connect(server)
        rest = list(events)
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "[DONE]"
    assert server.process.wait(SOON_S) == 0
    assert_gone(engine)


def test_streams_that_take_too_long_end_with_an_error_event(start_server: StartServer) -> None:
    server = start_server("--exit-timeout-secs=0", "--max-num-seqs=1")
    engine = server.engine()
    with server.client() as client, server.client() as other, open_stream(client, 30_000) as events:
        waiting = connect(server)
        body = b'{"model": "tiny", "prompt": "x", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        waiting.sendall(head % len(body) + body)
        wait_until(lambda: metric(server, "sluice_sequences_waiting") == 1)
        server.process.send_signal(signal.SIGINT)
        last = json.loads(list(events)[-1])
        answer = waiting.makefile("rb").read()
        waiting.close()
        other.close()
    assert last["error"]["message"] == "the server is shutting down"
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is shutting down" in answer
    assert server.process.wait(SOON_S) == 0
    assert_gone(engine)
    assert "Traceback" not in server.log


def check_start_times(server: ServerProcess) -> None:
    """Check that a debug log in JSON says where the time of the start went."""
    wait_until(lambda: ") ready" in server.log)
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "logger", "request_id", "message"} <= line.keys() for line in lines), lines
    assert any(line["request_id"] == "engine" and line["message"].startswith("loaded ") for line in lines), lines
    marks = [line for line in lines if line["message"].startswith("start: ")]
    of_engine = [line["message"] for line in marks if line["request_id"] == "engine"]
    assert any(each.endswith("model loaded and compiled") for each in of_engine)
    totals = [int(line["message"].split()[1]) for line in marks if line["request_id"] != "engine"]
    assert len(totals) >= 5 and totals == sorted(totals)


def test_a_second_signal_ends_at_once(start_server: StartServer) -> None:
    server = start_server(EXIT_S, "--log-level=debug", "--log-format=json")
    check_start_times(server)
    engine = server.engine()
    with server.client() as client, open_stream(client, 30_000):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "shutting down" in server.log)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(SIGNAL_ECHO_S + 0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON_S) == 128 + signal.SIGTERM
    assert_gone(engine)


def test_a_killed_gateway_leaves_no_engine_and_no_socket(start_server: StartServer) -> None:
    server = start_server("--log-level=warning")
    assert server.log == "", "neither process says what is below the level asked for"
    engine = server.engine()
    endpoint = next(part for part in engine.cmdline() if part.startswith("ipc://"))
    folder = Path(endpoint.removeprefix("ipc://")).parent
    assert [file.name for file in folder.iterdir()] == ["engine"]  # its configuration is read, and gone
    assert not any("model_path" in part for part in engine.cmdline())
    server.process.kill()
    server.process.wait(SOON_S)
    wait_until(lambda: not folder.exists())
    assert_gone(engine)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with TemporaryDirectory(prefix="sluice-test-") as folder:
        yield Path(folder)


def test_what_a_killed_server_has_left_is_gone_after_the_next_one(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    (tmp_path / "models").mkdir()
    command = (tmp_path / "log", "--model-repository", str(tmp_path / "models"), "--http-workers=2", "--host=0.0.0.0")
    with running_command(*command) as server:
        server.wait_ready()
        assert "listening on 0.0.0.0 without an API key" in server.log
        [left] = short_folder.iterdir()
        children = psutil.Process(server.pid).children(recursive=True)
        for child in children:
            child.suspend()  # a worker that outlives its gateway would clean up
        server.process.kill()
        for child in children:
            child.kill()
        server.process.wait(SOON_S)
        assert list(left.glob("sockets-*/*"))
    with running_command(*command[:3]) as server:
        assert not left.exists()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON_S) == 0
    assert list(short_folder.iterdir()) == []


@contextmanager
def restarting(server: ServerProcess) -> Iterator[None]:
    """Kill the engine for the context's duration; at its end another one is ready."""
    server.engine().kill()
    with server.client() as client:
        wait_until(lambda: client.get("/v2/health/ready").status_code != 200)
        yield
        wait_until(lambda: client.get("/v2/health/ready").status_code == 200)


def test_a_killed_engine_is_replaced_and_streams_go_on_also_while_the_server_ends(start_server: StartServer) -> None:
    server = start_server("--dtype=f32", EXIT_S)
    engine = server.engine()
    with server.client() as client, server.client() as other, open_stream(client, 120) as events:
        with restarting(server):
            assert client.get("/v2/health/live").status_code == 200
            assert other.get("/health").json()["reason"] == "the engine is restarting"
            answer = other.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
            assert answer.status_code == 200, "it waited for the next engine"
        rest = list(events)
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "[DONE]"
    with server.client() as client, open_stream(client, 120) as undisturbed:
        assert text_of([*undisturbed]) == text_of(rest)
    assert_gone(engine)
    assert server.engine().pid != engine.pid
    assert "ended unexpectedly with code -9" in server.log
    assert "the engine is back after" in server.log
    assert metric(server, "sluice_live") == metric(server, "sluice_ready") == 1
    with server.client() as client, open_stream(client, 120) as events:
        server.engine().kill()
        wait_until(lambda: server.log.count("starting another") == 2)
        server.process.send_signal(signal.SIGTERM)
        rest = list(events)
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(SOON_S) == 0


# -- how it starts


def test_it_is_guarded_from_the_first_moment_and_a_signal_while_loading_ends_it(start_server: StartServer) -> None:
    server = start_server("--api-key=sesame", "--host=0.0.0.0", EXIT_S, is_ready=False)
    children = psutil.Process(server.pid).children()
    with server.client() as client:
        assert client.get("/health").status_code in (200, 503)
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v2").status_code == 401
        assert httpx.get(server.metrics_url).status_code == 401
        key = {"authorization": "Bearer sesame"}
        assert client.get("/v1/models", headers=key).status_code in (200, 503)
        assert httpx.get(server.metrics_url, headers=key).status_code == 200
    assert "sesame" not in server.log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SOON_S) == 0
    for child in children:
        assert_gone(child)
    assert "Traceback" not in server.log
    assert "without an API key" not in server.log


def refusal(log_path: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code of a server that cannot start, and the last line that it prints."""
    with (
        log_path.open("w") as log,
        start_command(serve_command("--http-port=0", "--metrics-port=0", *arguments), log) as process,
    ):
        code = process.wait(PATIENCE_S)
    text = log_path.read_text()
    assert "Traceback" not in text
    return code, text.splitlines()[-1]


def test_too_few_file_descriptors_are_one_clear_line(checkpoint: Path) -> None:
    command = shlex.join(serve_command(str(checkpoint), "--http-port=0", "--metrics-port=0"))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 24; exec {command}"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("sluice serve: error: this process may open 24 files, and needs at least 128")
    assert "raise the hard limit (`ulimit -Hn`" in line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param((), 1, r".* is too long for sockets in it; set TMPDIR to one of at most .*", id="a long TMPDIR"),
        pytest.param(
            ("--grpc-port={taken}",),
            1,
            r".*port \d+ on 127.0.0.1 is taken; choose another with --grpc-port \(0 takes a free one\)",
            id="a taken port",
        ),
        pytest.param(
            ("--grpc-use-ssl=true", "--grpc-server-cert=/nowhere/cert.pem", "--grpc-server-key=/nowhere/key.pem"),
            2,
            r".*--grpc-server-cert cannot be read.*",
            id="a certificate that is not there",
        ),
    ],
)
def test_what_cannot_start_says_so_in_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / ("x" * 90)).mkdir()
    if not arguments:
        monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 90)))
    with listen("127.0.0.1", 0, "--http-port") as taken:
        port = taken.getsockname()[1]
        given = [each.format(taken=port) for each in arguments]
        found, line = refusal(tmp_path / "log", "--http-workers=2", "--model-repository", str(tmp_path), *given)
    assert (found, bool(re.fullmatch(said, line))) == (code, True), line


def test_a_model_that_cannot_be_loaded_is_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    code, line = refusal(tmp_path / "log", str(folder))
    assert code == 1
    assert line.startswith("sluice serve: error: ")
    assert "mamba" in line.lower()
