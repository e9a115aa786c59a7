"""Leaks of models that are loaded and unloaded: memory, open files, processes."""

import shutil
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.triton.repository import DENSE_WIDTH, write_onnx_models, write_python_models
from benchmarks.triton.servers import V2Server, sluice
from sluice.gateway.checkpoint import find_checkpoint

ROUNDS = 1000
LLM_ROUNDS = 100
"""Rounds of language models. Each starts an engine, which takes most of a second."""
SETTLED_SHARE = 0.2
"""Share of the rounds after which libraries have allocated what they keep."""
TIMEOUT_S = 60.0
MAX_GROWTH_MB = 10.0
_ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [ 256 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 256 ] } ]
ensemble_scheduling { step [ { model_name: "dense_single" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""
_TORCH = f"""\
backend: "pytorch"
max_batch_size: 64
input [ {{ name: "x__0" data_type: TYPE_FP32 dims: [ {DENSE_WIDTH} ] }} ]
output [ {{ name: "y__0" data_type: TYPE_FP32 dims: [ {DENSE_WIDTH} ] }} ]
"""
_SAVED_MODEL = Path(__file__).parents[2] / "tests" / "data" / "tensorflow" / "dense" / "model.savedmodel"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A model to load and unload."""

    backend: str
    name: str
    num_rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Resources of a server: memory and open files of its own process, and the processes that it has started."""

    rss_mb: float
    num_files: int
    num_processes: int


def measure(out: Path, report: ReportProgress) -> list[Figure]:
    """Measure the growth over rounds of load and unload, for each backend that is installed here and needs no GPU."""
    folder = out.resolve() / "triton" / "reloading"
    figures = []
    for model in _write_models(folder / "models"):
        with sluice(folder / "models", folder / "sluice.log", "--model-control-mode=explicit") as server:
            figures += _growth(server, model, report)
    return figures


def _write_models(folder: Path) -> list[Reloaded]:
    """Write a model of each backend. An ensemble is unloaded with its step."""
    shutil.rmtree(folder, ignore_errors=True)
    write_python_models(folder)
    write_onnx_models(folder)
    _folder_of(folder / "whole", _ENSEMBLE)
    openvino = 'backend: "openvino"\ndefault_model_filename: "model.onnx"\nmax_batch_size: 64\n'
    shutil.copy(folder / "dense_single" / "1" / "model.onnx", _folder_of(folder / "dense_openvino", openvino))
    saved = _folder_of(folder / "dense_tensorflow", 'backend: "tensorflow"\n')
    shutil.copytree(_SAVED_MODEL, saved / _SAVED_MODEL.name)
    checkpoint = find_checkpoint(None)
    _folder_of(
        folder / "text",
        f'backend: "llm"\nparameters {{ key: "gpt_model_path" value {{ string_value: "{checkpoint}" }} }}\n',
    )
    models = [
        Reloaded("onnxruntime", "dense_single"),
        Reloaded("openvino", "dense_openvino"),
        Reloaded("ensemble", "whole"),
        Reloaded("tensorflow", "dense_tensorflow"),
        Reloaded("python", "identity"),
        Reloaded("llm", "text", LLM_ROUNDS),
    ]
    if find_spec("torch") is not None:
        _write_torchscript(_folder_of(folder / "dense_torch", _TORCH) / "model.pt")
        models.append(Reloaded("pytorch", "dense_torch"))
    return models


def _folder_of(model: Path, config: str) -> Path:
    """Make the folder of a model with one version. Returns the version's folder."""
    version = model / "1"
    version.mkdir(parents=True)
    (model / "config.pbtxt").write_text(config)
    return version


def _write_torchscript(file: Path) -> None:
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(DENSE_WIDTH, DENSE_WIDTH), torch.nn.ReLU())
    torch.jit.trace(layers, torch.zeros(1, DENSE_WIDTH)).save(str(file))


def _growth(server: V2Server, model: Reloaded, report: ReportProgress) -> list[Figure]:
    num_settled = int(model.num_rounds * SETTLED_SHARE)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http_port}", timeout=TIMEOUT_S) as client:
        for _ in range(num_settled):
            _round(client, model.name)
        _await_unloaded(client, model.name)
        before = _resource_use(server)
        for _ in range(model.num_rounds - num_settled):
            _round(client, model.name)
        _await_unloaded(client, model.name)
        after = _resource_use(server)
    backend = model.backend
    report(f"{backend}: {before} -> {after}")
    name = f"{model.num_rounds} loads and unloads"
    more_files, more_processes = after.num_files - before.num_files, after.num_processes - before.num_processes
    return [
        Figure(f"{name}, memory grown", backend, "MB", (after.rss_mb - before.rss_mb,), Target(MAX_GROWTH_MB)),
        Figure(f"{name}, more open files", backend, "files", (float(more_files),), Target(0)),
        Figure(f"{name}, more processes", backend, "processes", (float(more_processes),), Target(0)),
    ]


def _round(client: httpx.Client, name: str) -> None:
    _post(client, f"/v2/repository/models/{name}/load")
    _post(client, f"/v2/repository/models/{name}/unload", {"parameters": {"unload_dependents": True}})


def _await_unloaded(client: httpx.Client, name: str) -> None:
    """Wait until no model is loaded: an unload is answered before the model has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        rows = _post(client, "/v2/repository/index").json()
        if all(row.get("state", "UNAVAILABLE") == "UNAVAILABLE" for row in rows):
            return
        time.sleep(0.1)
    raise BenchmarkError(f"{name} did not end within {TIMEOUT_S:g} s of being unloaded")


def _post(client: httpx.Client, path: str, body: dict[str, object] | None = None) -> httpx.Response:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise BenchmarkError(f"{path}: {answer.text[:300]}")
    return answer


def _resource_use(server: V2Server) -> ResourceUse:
    children = server.process.children(recursive=True)
    alive = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return ResourceUse(server.rss_mb(), server.process.num_fds(), len(alive))
