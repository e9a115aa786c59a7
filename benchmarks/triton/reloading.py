"""Whether anything is left behind by models that come and go: memory, open files, processes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.offline.environments import Say
from benchmarks.triton.repository import write_onnx_models, write_python_models
from benchmarks.triton.servers import V2Server, sluice

ROUNDS = 1000
SETTLED_AFTER = 200
"""Rounds after which libraries have what they keep for good."""
PATIENCE_S = 60.0
MOST_GROWTH_MB = 10.0
_ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [ 256 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 256 ] } ]
ensemble_scheduling { step [ { model_name: "dense_single" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a server holds: memory of its own process, its open files, the processes that it has started."""

    rss_mb: float
    num_files: int
    num_processes: int


def measure(out: Path, say: Say) -> list[Figure]:
    """Growth over a thousand rounds of load and unload, for each backend that needs no extra."""
    folder = out.resolve() / "triton" / "reloading"
    names = _write_models(folder / "models")
    figures = []
    for backend, name in names.items():
        with sluice(folder / "models", folder / "sluice.log", "--model-control-mode=explicit") as server:
            figures += _growth(server, backend, name, say)
    return figures


def _write_models(folder: Path) -> dict[str, str]:
    """A model of each backend by name; an ensemble takes its step along."""
    shutil.rmtree(folder, ignore_errors=True)
    write_python_models(folder)
    write_onnx_models(folder)
    (folder / "whole" / "1").mkdir(parents=True)
    (folder / "whole" / "config.pbtxt").write_text(_ENSEMBLE)
    (folder / "dense_openvino" / "1").mkdir(parents=True)
    shutil.copy(folder / "dense_single" / "1" / "model.onnx", folder / "dense_openvino" / "1")
    (folder / "dense_openvino" / "config.pbtxt").write_text(
        'backend: "openvino"\ndefault_model_filename: "model.onnx"\nmax_batch_size: 64\n'
    )
    return {
        "onnxruntime": "dense_single",
        "openvino": "dense_openvino",
        "ensemble": "whole",
        "python": "identity",
    }


def _growth(server: V2Server, backend: str, name: str, say: Say) -> list[Figure]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.http_port}", timeout=PATIENCE_S) as client:
        for _ in range(SETTLED_AFTER):
            _round(client, name)
        before = _holdings(server)
        for _ in range(ROUNDS - SETTLED_AFTER):
            _round(client, name)
        after = _holdings(server)
    say(f"{backend}: {before} -> {after}")
    what = f"{ROUNDS} loads and unloads"
    more_files, more_processes = after.num_files - before.num_files, after.num_processes - before.num_processes
    return [
        Figure(f"{what}, memory grown", backend, "MB", (after.rss_mb - before.rss_mb,), Target(MOST_GROWTH_MB)),
        Figure(f"{what}, more open files", backend, "files", (float(more_files),), Target(0)),
        Figure(f"{what}, more processes", backend, "processes", (float(more_processes),), Target(0)),
    ]


def _round(client: httpx.Client, name: str) -> None:
    _ask(client, f"/v2/repository/models/{name}/load")
    _ask(client, f"/v2/repository/models/{name}/unload", {"parameters": {"unload_dependents": True}})


def _ask(client: httpx.Client, path: str, body: dict[str, object] | None = None) -> None:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise BenchmarkError(f"{path}: {answer.text[:300]}")


def _holdings(server: V2Server) -> Holdings:
    children = server.process.children(recursive=True)
    alive = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return Holdings(server.rss_mb(), server.process.num_fds(), len(alive))
