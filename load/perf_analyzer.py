"""The command `sluice load perf-analyzer`: takes the command lines of NVIDIA's perf_analyzer that are in print.

It runs a closed loop of requests to one v2 model over HTTP, and reads from the server's statistics where the requests
spent their time there. perf_analyzer itself runs against Sluice; this command is for machines that do not have it.
"""

import argparse
import asyncio
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.load.config import ApiKind, LoadConfig, LoadTarget, RequestPace, Workload
from sluice.load.connection import ConnectionPool
from sluice.load.run import FAILED, INTERRUPTED, Run, RunError, get_json, reports_errors, run_load
from sluice.load.values import argument, at_least, new_file, shape

_DESCRIPTION = """\
Measure a model of a v2 server (Triton, Sluice) with some flags of NVIDIA's perf_analyzer. For its other flags run
perf_analyzer itself against this server.

Tensors are random, of the shapes in the model's metadata. `sluice load` itself measures language models by tokens.
"""
_EPILOG = """\
examples:
  sluice load perf-analyzer -m classification-pipeline -c 100 -d 60 -f results.csv
  sluice load perf-analyzer -m bert-classifier --triton-http-endpoint localhost:8000 --shape input_ids:1,128

Exit status: 0 all served, 1 some requests failed, 2 the run could not begin, 130 interrupted.
"""


class _Duration(msgspec.Struct):
    count: int = 0
    ns: int = 0


class _Times(msgspec.Struct):
    success: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute_input: _Duration = field(default_factory=_Duration)
    compute_infer: _Duration = field(default_factory=_Duration)
    compute_output: _Duration = field(default_factory=_Duration)


class _ModelStats(msgspec.Struct):
    execution_count: int = 0
    inference_count: int = 0
    inference_stats: _Times = field(default_factory=_Times)


class _Statistics(msgspec.Struct):
    model_stats: list[_ModelStats]


@dataclass(frozen=True, slots=True)
class ServerSplit:
    """The mean time of a request in the server, in microseconds, by the model's statistics."""

    num_requests: int
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    batch_size: float
    """Inferences to an execution; 0 for a model without executions of its own, such as an ensemble."""

    @property
    def total_us(self) -> float:
        return self.queue_us + self.compute_input_us + self.compute_infer_us + self.compute_output_us


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run, and where the server spent the time; None for a server without statistics."""

    run: Run
    split: ServerSplit | None


@reports_errors("sluice load perf-analyzer")
def perf_analyzer(argv: list[str]) -> int:
    """Measure, print what perf_analyzer prints, and write its CSV."""
    arguments = _parser().parse_args(argv)
    measurement = asyncio.run(_measure(_config(arguments)))
    for line in _lines(measurement, arguments.concurrency):
        sys.stdout.write(f"{line}\n")
    if arguments.latency_report_file is not None:
        _write_csv(arguments.latency_report_file, measurement, arguments.concurrency)
    if measurement.run.was_interrupted:
        return INTERRUPTED
    return FAILED if measurement.run.summary.num_failed else 0


def _parser() -> argparse.ArgumentParser:
    """Return a parser that takes no flag shortened: another flag of perf_analyzer may begin alike."""
    options = argparse.ArgumentParser(
        "sluice load perf-analyzer",
        description=_DESCRIPTION,
        usage="%(prog)s [OPTION ...]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    add("-m", "--model-name", required=True, metavar="MODEL", help="the model")
    add(
        "-u",
        "--url",
        "--triton-http-endpoint",
        default="localhost:8000",
        metavar="HOST:PORT",
        help="where the server's HTTP port is (%(default)s)",
    )
    add("-c", "--concurrency", type=at_least(1), default=1, metavar="N", help="requests at a time (1)")
    duration = options.add_mutually_exclusive_group()
    duration.add_argument("-d", "--duration", type=at_least(1), metavar="S", help="seconds (--measurement-interval)")
    duration.add_argument("--duration-ms", type=at_least(1), metavar="MS", help="the same in milliseconds")
    add("--measurement-interval", type=at_least(1), default=5000, metavar="MS", help="the same (%(default)s)")
    add("--shape", type=argument(shape), action="append", default=[], metavar="NAME:D,D,...", help="of an input")
    add("--collect-metrics", action="store_true", help="taken; the server's times are read always")
    add(
        "-f",
        "--latency-report-file",
        type=argument(new_file),
        metavar="FILE",
        help="write a CSV as perf_analyzer does",
    )
    return options


def _config(arguments: argparse.Namespace) -> LoadConfig:
    url: str = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
    duration_s = arguments.duration or (arguments.duration_ms or arguments.measurement_interval) / 1e3
    return LoadConfig(
        LoadTarget(url, ApiKind.INFER_BINARY, arguments.model_name),
        RequestPace(concurrency=arguments.concurrency, duration_s=float(duration_s)),
        Workload(shapes=dict(arguments.shape)),
    )


async def _measure(config: LoadConfig) -> Measurement:
    before = await _statistics(config)
    run = await run_load(config)
    return Measurement(run, _split(before, await _statistics(config)))


async def _statistics(config: LoadConfig) -> _ModelStats | None:
    """Return the model's counts of all its versions, None where the server has no statistics."""
    pool = ConnectionPool(config.target.url, asyncio.get_running_loop().time)
    try:
        rows = await get_json(pool, config, f"/v2/models/{config.target.model}/stats", _Statistics)
    except RunError as error:
        if error.is_refusal:
            return None
        raise
    finally:
        pool.close()
    return rows.model_stats[-1] if rows.model_stats else None


def _split(before: _ModelStats | None, after: _ModelStats | None) -> ServerSplit | None:
    if before is None or after is None:
        return None
    num_requests = after.inference_stats.success.count - before.inference_stats.success.count
    if num_requests < 1:
        return None

    def mean_us(name: str) -> float:
        first, last = (getattr(each.inference_stats, name).ns for each in (before, after))
        return float(last - first) / num_requests / 1e3

    executions = after.execution_count - before.execution_count
    inferences = after.inference_count - before.inference_count
    return ServerSplit(
        num_requests,
        queue_us=mean_us("queue"),
        compute_input_us=mean_us("compute_input"),
        compute_infer_us=mean_us("compute_infer"),
        compute_output_us=mean_us("compute_output"),
        batch_size=inferences / executions if executions else 0.0,
    )


def _lines(measurement: Measurement, concurrency: int) -> Iterator[str]:
    s = measurement.run.summary
    yield f"Request concurrency: {concurrency}"
    yield f"  Client: {s.num_served} requests in {s.wall_s:.2f} s, {s.num_failed} failed"
    for label, failure in s.failures.items():
        yield f"    {label}: {failure.count}, first: {failure.example[:160]}"
    yield f"    Throughput: {s.requests_per_s:.2f} infer/sec"
    if not s.num_served:
        return
    e2e = s.e2e_ms
    yield f"    Avg latency: {_us(e2e.mean)} usec"
    for name, value in (("p50", e2e.p50), ("p90", e2e.p90), ("p95", e2e.p95), ("p99", e2e.p99)):
        yield f"    {name} latency: {_us(value)} usec"
    split = measurement.split
    if split is not None:
        yield f"  Server: {split.num_requests} requests, {split.batch_size:.2f} to an execution"
        yield (
            f"    Avg request latency: {split.total_us:.0f} usec (queue {split.queue_us:.0f} usec + compute input "
            f"{split.compute_input_us:.0f} usec + compute infer {split.compute_infer_us:.0f} usec + compute output "
            f"{split.compute_output_us:.0f} usec)"
        )
        yield f"    Bottleneck: {bottleneck(split, e2e.mean or 0.0)}"
    yield f"Concurrency: {concurrency}, throughput: {s.requests_per_s:.2f} infer/sec, latency {_us(e2e.mean)} usec"


def bottleneck(split: ServerSplit, latency_ms: float) -> str:
    """Describe in words where most of a request's time went."""
    parts = {
        "waiting in the queue: more instances, or larger batches": split.queue_us,
        "computing": split.compute_infer_us,
        "copying inputs and outputs": split.compute_input_us + split.compute_output_us,
        "outside the model: network, client, or the steps of an ensemble": latency_ms * 1e3 - split.total_us,
    }
    cause = max(parts, key=lambda each: parts[each])
    return f"{cause} ({parts[cause] / max(latency_ms * 1e3, 1e-9):.0%} of the latency)"


def _us(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds * 1e3:.0f}"


_CSV_COLUMNS = (
    "Inferences/Second",
    "Client Send",
    "Network+Server Send/Recv",
    "Server Queue",
    "Server Compute Input",
    "Server Compute Infer",
    "Server Compute Output",
    "Client Recv",
    "p50 latency",
    "p90 latency",
    "p95 latency",
    "p99 latency",
)


def _write_csv(path: Path, measurement: Measurement, concurrency: int) -> None:
    """Write perf_analyzer's columns. The client's own share is not told apart from the network's."""
    s = measurement.run.summary
    e2e = s.e2e_ms
    split = measurement.split or ServerSplit(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    client_us, network_us = 0.0, max(0.0, (e2e.mean or 0.0) * 1e3 - split.total_us)
    server_us = (split.queue_us, split.compute_input_us, split.compute_infer_us, split.compute_output_us)
    times = [f"{value:.0f}" for value in (client_us, network_us, *server_us, client_us)]
    percentiles = map(_us, (e2e.p50, e2e.p90, e2e.p95, e2e.p99))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Concurrency", *_CSV_COLUMNS])
        writer.writerow([str(concurrency), f"{s.requests_per_s:.2f}", *times, *percentiles])
