"""A server whose engine is vLLM, on the CPU, and what vLLM generates by itself."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.engine.delegated.vllm.library import ENVIRONMENT
from tests.paths import MODELS, VLLM_PYTHON
from tests.server_process import ServerProcess, running_command
from tests.vllm.adapters import make_adapter

RILL = MODELS / "rill" / "1"
ADAPTERS = ("loud", "quiet")
NUM_BLOCKS = 24
"""Blocks of a cache that is too small for all at once."""
BLOCK_SIZE = 32
SMALL = {"num_gpu_blocks_override": NUM_BLOCKS + 1, "block_size": BLOCK_SIZE, "max_model_len": 256}
PROMPTS = [[1, *range(5 + number, 25 + 2 * number)] for number in range(32)]
MAX_TOKENS = 48
LONG = 150
"""Tokens of each answer under overload."""
PATIENCE_S = 300.0
_READ = """
import json, sys
from pydantic import TypeAdapter
import vllm.entrypoints.scale_out.token_in_token_out.protocol as protocol
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
found = {}
for name, answers in json.load(sys.stdin).items():
    kind = TypeAdapter(getattr(protocol, name, None) or ChatCompletionResponse)
    found[name] = [json.loads(kind.validate_python(each).model_dump_json()) for each in answers]
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    if "vllm" not in request.config.getoption("markexpr"):
        pytest.skip("vLLM takes half a minute to start: `make test-vllm` runs its tests")
    if not VLLM_PYTHON.is_file():
        pytest.skip("vLLM is not installed: `make test-vllm` installs it into build/vllm-venv")
    return str(VLLM_PYTHON)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(RILL, folder / name, seed) for seed, name in enumerate(ADAPTERS, 1)}


def arguments(python: str, model: Path = RILL) -> list[str]:
    eager = "--runtime-setting=enforce_eager=true"  # compiling would take a minute
    return [str(model), "--runtime=vllm", f"--engine-python={python}", "--dtype=f32", eager]


@pytest.fixture(scope="session")
def kv_events(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where vLLM publishes the events of its KV cache."""
    return f"ipc://{tmp_path_factory.mktemp('kv')}/events"


@pytest.fixture(scope="session")
def server(
    vllm_python: str, adapters: dict[str, Path], kv_events: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """rill on vLLM, with two LoRA adapters. It publishes its KV events."""
    modules = [f"--lora-modules={name}={folder}" for name, folder in adapters.items()]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kv_events, "topic": "kv"}
    modules.append(f"--runtime-setting=kv_events_config={json.dumps(events)}")
    modules += ["--allow-runtime-lora-updating", "--enable-sleep-mode"]
    log = tmp_path_factory.mktemp("log") / "server"
    with running_command(log, *arguments(vllm_python), *modules) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def small_server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """rill in a repository of Triton's vLLM backend, with a cache of NUM_BLOCKS blocks."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "rill" / "1").mkdir(parents=True)
    runtime = 'parameters { key: "runtime" value { string_value: "vllm" } }'
    (repository / "rill" / "config.pbtxt").write_text(f'backend: "vllm"\n{runtime}\n')
    engine = {"model": str(RILL), "dtype": "float32", "enforce_eager": True, "disable_log_requests": True}
    (repository / "rill" / "1" / "model.json").write_text(json.dumps(engine | SMALL))
    log = tmp_path_factory.mktemp("log") / "small"
    with running_command(log, f"--model-repository={repository}", f"--engine-python={vllm_python}") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def plain(vllm_python: str) -> dict[str, Any]:
    """Return what vLLM generates by itself: `alone`, `together`, and `overload` with the small cache."""
    common = {"model": str(RILL), "dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
    large = {**common, "kv_cache_memory_bytes": 256 << 20}
    jobs = {
        "alone": {"arguments": large, "prompts": PROMPTS[:4], "max_tokens": MAX_TOKENS, "one_by_one": True},
        "together": {"arguments": large, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "one_by_one": False},
        "overload": {"arguments": large | SMALL, "prompts": PROMPTS, "max_tokens": LONG, "one_by_one": False},
    }
    switches = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    command = ["env", *switches, vllm_python, str(Path(__file__).with_name("plain.py"))]
    done = subprocess.run(command, input=json.dumps([*jobs.values()]), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def complete(server: ServerProcess, prompt: list[int] | str, model: str = "rill", **fields: Any) -> dict[str, Any]:
    """The answer to a completion: greedy, and to the last token, unless `fields` say otherwise."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.metrics_url, timeout=PATIENCE_S).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


@pytest.fixture(scope="session")
def read_by_vllm(vllm_python: str) -> Callable[[dict[str, list[Any]]], Any]:
    """Return what reads objects as vLLM's own models, by the models' names, and writes them again."""

    def read(objects: dict[str, list[Any]]) -> Any:
        command = [vllm_python, "-c", _READ]
        done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return read
