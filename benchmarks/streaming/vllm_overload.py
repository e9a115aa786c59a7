"""vLLM behind Sluice beside vLLM's own server, with the same cache, which is too small for all that come at once.

Both run the same engine. Behind Sluice it gets a request once there is room for its worst case; by itself it admits by
the prompt, and preempts. Rows with few streams say what Sluice costs where there is no such need.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.offline.environments import VLLM, interpreter
from benchmarks.server import running_server
from benchmarks.streaming.client import Client, completion_request
from benchmarks.streaming.peers import IDLE_S, Peer, sluice, vllm
from benchmarks.streaming.streams import cores
from sluice.gateway.checkpoint import find_checkpoint, model_name

ROOT = Path(__file__).parents[2]
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_MODEL_LEN = 32, 128, 64, 512
PROMPT = [300 + number for number in range(64)]
PAUSE_MS = 250.0
"""A longer gap in an answer is a pause that its reader sees; the median gap of these rows is a tenth of it."""
PREEMPTIONS = {"Sluice": "sluice_engine_preemptions_total", "vLLM": "vllm:num_preemptions_total"}
ADDED_CPU = Target(10.0)
ADDED_TTFT = Target(2.0)
AT_LEAST_AS_MUCH = Target(1.0, is_ceiling=False)


@dataclass(frozen=True, slots=True)
class Row:
    """Streams at a time, requests in all, tokens of each answer."""

    streams: int
    requests: int
    tokens: int

    @property
    def is_overload(self) -> bool:
        return self.streams * (len(PROMPT) + self.tokens) > NUM_BLOCKS * BLOCK_SIZE

    @property
    def name(self) -> str:
        return f"{self.streams} streams of {self.tokens} tokens"


ROWS = (Row(1, 8, 128), Row(8, 32, 128), Row(64, 128, 192))


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure all rows; the servers take turns in an order that changes with each repeat."""
    python = interpreter(VLLM, folder / "envs", report)
    client = Client.build(folder, [*cores()[0], *cores()[1]])
    report("starting vLLM behind Sluice and vLLM's server; a minute or two")
    common = ("--block-size", BLOCK_SIZE, "--max-num-seqs", MAX_NUM_SEQS, "--max-model-len", MAX_MODEL_LEN)
    theirs = ("--dtype", "float32", "--enforce-eager", "--num-gpu-blocks-override", NUM_BLOCKS + 1)
    options = ("--no-enable-prefix-caching", *theirs, *common)
    with vllm(python, folder, *map(str, options)) as plain, sluice(
        lambda: running_server(find_checkpoint(None), folder / "overload.log", *_sluice_options(python), prefix=ENGINE),
        has_engine_in_front=True,
    ) as ours:  # fmt: skip
        return list(_take_turns((ours, plain), client, num_repeats, report))


ENGINE = ("env", f"PYTHONPATH={ROOT}")
"""vLLM's environment has no Sluice."""


def _sluice_options(python: Path) -> tuple[str, ...]:
    settings = {"enforce_eager": "true", "block_size": BLOCK_SIZE}
    return (
        "--runtime=vllm",
        f"--engine-python={python}",
        "--dtype=f32",
        f"--num-blocks={NUM_BLOCKS}",
        f"--max-num-seqs={MAX_NUM_SEQS}",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--enable-prefix-caching=false",
        *(f"--runtime-setting={name}={value}" for name, value in settings.items()),
    )


def _take_turns(peers: tuple[Peer, Peer], client: Client, num_repeats: int, report: ReportProgress) -> Iterator[Figure]:
    samples: dict[tuple[str, Row, str, str], list[float]] = defaultdict(list)
    for peer in peers:  # what is compiled at the first of its kind is compiled
        _measure_turn(peer, ROWS[-1], client)
    for repeat in range(num_repeats):
        for row in ROWS:
            for peer in peers if repeat % 2 == 0 else peers[::-1]:
                time.sleep(IDLE_S)
                values = _measure_turn(peer, row, client)
                report(f"{peer.name}, {row.name}: " + ", ".join(f"{n} {v:.5g}" for n, (v, _) in values.items()))
                for name, (value, unit) in values.items():
                    samples[peer.name, row, name, unit].append(value)
    for (peer_name, row, name, unit), found in samples.items():
        target = Target(0) if (peer_name, name) == ("Sluice", "preemptions") else None
        yield Figure(name, f"{peer_name}, {row.name}", unit, tuple(found), target)
    for row in ROWS:
        yield from _compare(samples, row, [peer.name for peer in peers])


def _compare(samples: dict[tuple[str, Row, str, str], list[float]], row: Row, names: list[str]) -> Iterator[Figure]:
    def pairs(name: str, unit: str) -> list[tuple[float, float]]:
        ours, theirs = (samples[each, row, name, unit] for each in names)
        return list(zip(ours, theirs, strict=True))

    if not row.is_overload:
        added = tuple(ours - theirs for ours, theirs in pairs("front end's CPU", "us/token"))
        yield Figure("front end's CPU added", row.name, "us/token", added, ADDED_CPU)
        added = tuple(ours - theirs for ours, theirs in pairs("TTFT p50", "ms"))
        yield Figure("TTFT p50 added", row.name, "ms", added, ADDED_TTFT)
        return
    if not any(theirs for _, theirs in pairs("preemptions", "")):
        raise BenchmarkError("vLLM preempted nothing: there was no overload")
    for name, unit in (("output", "tokens/s"), ("answers without a pause", "/s")):
        ratios = tuple(ours / theirs if theirs else float("inf") for ours, theirs in pairs(name, unit))
        yield Figure(name, row.name, "times vLLM's", ratios, AT_LEAST_AS_MUCH)


def _measure_turn(peer: Peer, row: Row, client: Client) -> dict[str, tuple[float, str]]:
    request = completion_request(model_name(find_checkpoint(None)), row.tokens, prompt=PROMPT, temperature=0.0)
    (front_before, all_before), preempted = peer.cpu_s(), peer.metric(PREEMPTIONS[peer.name])
    load = client.run(
        peer.port, request, streams=row.streams, requests=row.requests, tokens=row.tokens, pause_ms=PAUSE_MS
    )
    front_s, all_s = peer.cpu_s()
    return {
        "output": (load.tokens_per_s, "tokens/s"),
        "answers without a pause": (load.smooth * 1e6 / load.elapsed, "/s"),
        "preemptions": (peer.metric(PREEMPTIONS[peer.name]) - preempted, ""),
        "TTFT p50": (load.first_p50 / 1e3, "ms"),
        "TTFT p99": (load.first_p99 / 1e3, "ms"),
        "ITL p50": (load.gap_p50 / 1e3, "ms"),
        "ITL p99": (load.gap_p99 / 1e3, "ms"),
        "longest gap": (load.gap_max / 1e3, "ms"),
        "front end's CPU": ((front_s - front_before) * 1e6 / load.tokens, "us/token"),
        "CPU of all processes": ((all_s - all_before) * 1e6 / load.tokens, "us/token"),
    }
