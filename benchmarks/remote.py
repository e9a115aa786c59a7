"""CPU time of a gateway for a token of an engine over TCP, beside one of its own: 64 streams of the bundled model."""

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.server import Server, running_engine, running_server, write_engines
from benchmarks.streaming.client import Client, chat_request
from benchmarks.streaming.streams import cores
from sluice.engine.process.curve import make_certificates
from sluice.gateway.checkpoint import find_checkpoint, model_name

NUM_STREAMS, NUM_TOKENS, NUM_REQUESTS = 64, 128, 192
THREADS = "--num-threads=1"
LOCAL, REMOTE, ENCRYPTED = "own engine", "engine over TCP", "engine over TCP, encrypted"
SUBJECTS = (LOCAL, REMOTE, ENCRYPTED)
TARGET = Target(5.0)


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure SUBJECTS in turns."""
    samples: dict[str, list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for subject in SUBJECTS:
            samples[subject].append(_gateway_us(subject, folder))
            report(f"{subject}, {repeat + 1} of {num_repeats}: {samples[subject][-1]:.1f} us a token")
    figures = [Figure("gateway CPU", subject, "us/token", tuple(samples[subject])) for subject in SUBJECTS]
    for subject in (REMOTE, ENCRYPTED):
        more = tuple(a - b for a, b in zip(samples[subject], samples[LOCAL], strict=True))
        figures.append(Figure("gateway CPU, more than with an own engine", subject, "us/token", more, TARGET))
    return figures


def _gateway_us(subject: str, folder: Path) -> float:
    client = Client.build(folder, cores()[1])
    request = chat_request(model_name(find_checkpoint(None)), NUM_TOKENS, temperature=0)
    with _gateway(subject, folder) as server:
        port = urlsplit(server.url).port
        assert port is not None
        client.run(port, request, streams=8, requests=32, tokens=NUM_TOKENS)
        before_s = server.gateway_cpu_s()
        load = client.run(port, request, streams=NUM_STREAMS, requests=NUM_REQUESTS, tokens=NUM_TOKENS)
        return (server.gateway_cpu_s() - before_s) * 1e6 / load.tokens


@contextmanager
def _gateway(subject: str, folder: Path) -> Iterator[Server]:
    """Run a gateway with an engine of its own, or with one that listens."""
    log = folder / "remote-gateway.log"
    if subject == LOCAL:
        with running_server(find_checkpoint(None), log, THREADS) as server:
            yield server
        return
    keys, options = _keys(folder / "remote-keys") if subject == ENCRYPTED else ({}, ())
    with running_engine(find_checkpoint(None), folder / "remote-engine.log", THREADS, *options) as (address, _):
        engines = write_engines(folder / "remote-engines.json", one={"address": address, **keys})
        with running_server(find_checkpoint(None), log, engines) as server:
            yield server


def _keys(folder: Path) -> tuple[dict[str, str], Sequence[str]]:
    """Make certificates for both sides. Returns the gateway's entries for the file of engines, and the engine's
    options."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "allowed").mkdir(parents=True)
    public, secret = make_certificates(folder, "engine")
    gateway_public, gateway_secret = make_certificates(folder, "gateway")
    shutil.copy(gateway_public, folder / "allowed")
    entries = {"server_key": str(public.resolve()), "client_key": str(gateway_secret.resolve())}
    return entries, ("--curve-key", str(secret), "--allowed-clients", str(folder / "allowed"))
