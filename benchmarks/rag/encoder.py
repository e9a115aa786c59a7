"""The bundled sentence encoder: over HTTP with and without dynamic batching, and in the ingestion of documents."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.rag.corpus import bundled_models
from benchmarks.rag.pipeline import QUESTIONS
from benchmarks.triton.servers import V2Server, sluice
from benchmarks.triton.wrk import LONGEST_S, check_wrk
from sluice.bundled import models_folder
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.stages.tokenizer_model import TextTokenizer

CLIENTS = (1, 16, 64)
SECONDS = 5.0
_WARM_S = 1.0
_BATCHED, _SINGLE = "sentence_encoder", "sentence_encoder_single"
_TOKENIZER, _PIPELINE = "sentence_tokenizer", "query_encoder"
_DYNAMIC_BATCHING = re.compile(r"^dynamic_batching .*$", re.MULTILINE)
_TARGET_GAIN = 5.0
"""Gain that GPUs reach easily. A CPU computes a few texts of ten tokens nearly as fast as one of hundreds."""
_CHUNK_CHARS = 800
"""About 200 tokens, the length of chunks."""
_NUM_CHUNKS = 400


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure requests/s of tokens without and with dynamic batching, in turns, and of text; then chunks/s.

    Raises BenchmarkError where a request fails, and where wrk is not installed.
    """
    check_wrk()
    folder = out.resolve() / "rag" / "encoder"
    _write_repository(folder / "models")
    with sluice(folder / "models", folder / "sluice.log") as server:
        figures = [figure for clients in CLIENTS for figure in _at(server, clients, repeats, report)]
    return [*figures, asyncio.run(_ingestion(repeats, report))]


def _write_repository(root: Path) -> None:
    """Write the bundled models, and a copy of the encoder without its dynamic batcher."""
    shutil.rmtree(root, ignore_errors=True)
    for name in (_TOKENIZER, _BATCHED, _PIPELINE):
        shutil.copytree(models_folder() / name, root / name)
    single = shutil.copytree(models_folder() / _BATCHED, root / _SINGLE)
    config, num_cut = _DYNAMIC_BATCHING.subn("", (single / "config.pbtxt").read_text())
    if not num_cut:
        raise BenchmarkError(f"{_BATCHED} has no dynamic_batching to compare without")
    (single / "config.pbtxt").write_text(config)


@dataclass(frozen=True, slots=True)
class _Run:
    """A measurement. `cpu_ms` is the server's CPU time per request, which other processes hardly change."""

    rate: float
    cpu_ms: float


def _at(server: V2Server, clients: int, repeats: int, report: ReportProgress) -> list[Figure]:
    tokens, texts = _token_requests(), _text_requests()
    subjects = {
        "one by one": (_SINGLE, tokens),
        "dynamic batching": (_BATCHED, tokens),
        "text, through the ensemble": (_PIPELINE, texts),
    }
    runs: dict[str, list[_Run]] = {subject: [] for subject in subjects}
    for _ in range(repeats):
        for subject, (model, bodies) in subjects.items():
            runs[subject].append(_run(server, model, bodies, clients))
        rates = ", ".join(f"{subject} {found[-1].rate:,.0f}" for subject, found in runs.items())
        report(f"{clients} clients, requests/s: {rates}")
    return _figures(clients, runs)


def _figures(clients: int, runs: Mapping[str, Sequence[_Run]]) -> list[Figure]:
    name = f"encoder, {clients} clients"
    figures = []
    for subject, found in runs.items():
        figures.append(Figure(name, subject, "requests/s", tuple(run.rate for run in found)))
        figures.append(Figure(name, subject, "CPU ms/request", tuple(run.cpu_ms for run in found)))
    single, batched, *_ = runs.values()
    gains = tuple(after.rate / before.rate for before, after in zip(single, batched, strict=True))
    target = Target(_TARGET_GAIN, is_ceiling=False) if clients == max(CLIENTS) else None
    return [*figures, Figure(name, "gain of batching", "ratio", gains, target)]


def _run(server: V2Server, model: str, bodies: Sequence[str], clients: int) -> _Run:
    _wrk(server, model, bodies, clients, _WARM_S)
    before = _cpu_s(server)
    rate = _wrk(server, model, bodies, clients, SECONDS)
    return _Run(rate, 1000 * (_cpu_s(server) - before) / (rate * SECONDS))


def _cpu_s(server: V2Server) -> float:
    times = server.process.cpu_times()
    return float(times.user + times.system)


def _wrk(server: V2Server, model: str, bodies: Sequence[str], clients: int, seconds: float) -> float:
    """Measure requests/s of `clients` that send `bodies` in turn. Raises BenchmarkError where a request fails."""
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{model}/infer"
    with NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_script(bodies))
        script.flush()
        command = ("wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "-s", script.name, url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    if rate is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise BenchmarkError(f"wrk against {model}: {done.stdout.strip()[-400:]}{done.stderr.strip()[-200:]}")
    return float(rate[1])


def _script(bodies: Sequence[str]) -> str:
    quoted = ", ".join(f"[==[{body}]==]" for body in bodies)
    return f"""
local bodies, sent = {{{quoted}}}, 0
local headers = {{["content-type"] = "application/json"}}
request = function()
  sent = sent % #bodies + 1
  return wrk.format("POST", nil, headers, bodies[sent])
end
"""


def _text_requests() -> list[str]:
    return [_body("text", "BYTES", [1, 1], [question]) for question in QUESTIONS]


def _token_requests() -> list[str]:
    tokenizer = TextTokenizer.load(models_folder() / _TOKENIZER / "1" / "tokenizer.json")
    return [_body("input_ids", "INT64", [1, len(ids)], ids) for ids in tokenizer.encode(QUESTIONS)]


def _body(name: str, datatype: str, shape: Sequence[int], data: Sequence[object]) -> str:
    return json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}]})


async def _ingestion(repeats: int, report: ReportProgress) -> Figure:
    """Measure the chunks encoded per second in one process, without parsing and storing."""
    chunks = _chunks()
    samples = []
    async with bundled_models(_PIPELINE) as repository:
        encoder = TextEncoder(repository, _PIPELINE)
        await encoder.encode_documents(chunks[:8])
        for _ in range(repeats):
            started = time.perf_counter()
            await encoder.encode_documents(chunks)
            samples.append(len(chunks) / (time.perf_counter() - started))
            report(f"ingestion: {samples[-1]:,.0f} chunks/s")
    return Figure(f"encoding of chunks of {_CHUNK_CHARS} characters", "sluice", "chunks/s", tuple(samples))


def _chunks() -> list[str]:
    """Cut this project's documentation into chunks."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    found = [text[start : start + _CHUNK_CHARS] for start in range(0, len(text) - _CHUNK_CHARS, _CHUNK_CHARS)]
    return (found * (1 + _NUM_CHUNKS // len(found)))[:_NUM_CHUNKS]
