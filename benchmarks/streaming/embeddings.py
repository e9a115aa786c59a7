"""`/v1/embeddings` beside Sentence Transformers in its own process, on one encoder in float32, taking turns."""

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    "sentence-transformers", "sentence-transformers", "6.2.0", ("torch==2.13.0", "onnx==1.23.2")
)
BATCHES = (1, 64)
SECONDS = 4.0
LEAST_COSINE = 0.999
TARGET = Target(1.0, is_ceiling=False)
MODEL, TOKENIZER = "encoder", "sentence_tokenizer"
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
    """Check that both give the same vectors, then measure texts/s of each batch size in turns."""
    folder = out.resolve() / "embeddings"
    client = Client.build(out, cores()[1])
    samples: dict[tuple[int, str], list[float]] = defaultdict(list)
    with _peer(folder, interpreter(SENTENCE_TRANSFORMERS, out / "envs", report)) as peer:
        _write_repository(folder)
        with sluice(folder / "models", folder / "sluice.log") as server:
            _check_agreement(server, peer)
            for repeat in range(num_repeats):
                for batch in BATCHES:
                    for name in sorted(("Sluice", "Sentence Transformers"), reverse=repeat % 2 == 0):
                        is_ours = name == "Sluice"
                        rate = _our_rate(server, client, batch) if is_ours else peer.encode(_texts(batch), SECONDS)[0]
                        samples[batch, name].append(rate)
                        report(f"{name}, batches of {batch}: {rate:,.0f} texts/s")
    return [figure for batch in BATCHES for figure in _figures(batch, samples)]


def _figures(batch: int, samples: dict[tuple[int, str], list[float]]) -> Iterator[Figure]:
    ours, theirs = (samples[batch, name] for name in ("Sluice", "Sentence Transformers"))
    subject = f"batches of {batch}"
    yield Figure("embeddings, Sluice over HTTP", subject, "texts/s", tuple(ours))
    yield Figure("embeddings, Sentence Transformers", subject, "texts/s", tuple(theirs))
    ratios = tuple(our / their for our, their in zip(ours, theirs, strict=True))
    yield Figure("embeddings, ratio", subject, "times the peer's", ratios, TARGET)


@contextmanager
def _peer(folder: Path, python: Path) -> Iterator[SentenceTransformers]:
    """Run the peer, which makes the model and its graph in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(models_folder() / TOKENIZER / "1" / "tokenizer.json", folder)
    command = (python, Path(__file__).with_name("sentence_transformers_worker.py"), folder)
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


def _check_agreement(server: V2Server, peer: SentenceTransformers) -> None:
    """Raises BenchmarkError where a vector is not the peer's. Both return vectors of length 1."""
    texts = _texts(max(BATCHES))
    body = json.dumps({"model": MODEL, "input": texts}).encode()
    url = f"http://127.0.0.1:{server.http_port}/v1/embeddings"
    with urlopen(Request(url, body, {"content-type": "application/json"})) as response:
        ours = np.array([entry["embedding"] for entry in json.load(response)["data"]])
    _, theirs = peer.encode(texts)
    least = float((ours * np.array(theirs)).sum(1).min())
    if least < LEAST_COSINE:
        raise BenchmarkError(f"a vector differs from the peer's: the least cosine is {least:.4f}, not {LEAST_COSINE}")


def _our_rate(server: V2Server, client: Client, batch: int) -> float:
    """Measure one client that sends batches one after the other, for about SECONDS."""
    texts = _texts(batch)
    request = http_request("/v1/embeddings", {"model": MODEL, "input": texts if batch > 1 else texts[0]})
    trial = client.run(server.http_port, request, streams=1, requests=5, tokens=0)
    num_requests = max(5, round(SECONDS * 1e6 * trial.answers / trial.elapsed))
    load = client.run(server.http_port, request, streams=1, requests=num_requests, tokens=0)
    return load.answers * batch * 1e6 / load.elapsed
