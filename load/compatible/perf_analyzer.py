"""The command `sluice load perf-analyzer`: NVIDIA's perf_analyzer by its own flags, for v2 models over HTTP.

It runs a closed loop for each concurrency of a range, or an open loop for each request rate, and reads from the
server's statistics what became of the time there.
"""

import argparse
import asyncio
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.load.compatible.common import FAILED, INTERRUPTED, USAGE_ERROR, ForeignParser, http_url
from sluice.load.config import ApiKind, Arrival, LoadConfig, LoadConfigError, LoadTarget, RequestPace, Workload
from sluice.load.connection import ConnectionPool
from sluice.load.run import Run, RunError, get_json, run_load
from sluice.load.values import argument, at_least, new_file, shape

_DESCRIPTION = """\
Measure a model of a v2 server (Triton, Sluice) as NVIDIA's perf_analyzer does, by its own flags.

Tensors are random, of the shapes in the model's metadata. `sluice load` itself measures language models by tokens.
"""
_EPILOG = """\
examples:
  sluice load perf-analyzer -m classification-pipeline -c 100 -d 60 -f results.csv
  sluice load perf-analyzer -m bert-classifier --triton-http-endpoint localhost:8000 --concurrency-range 1:16:4 \\
      --shape input_ids:1,128

Exit status: 0 all served, 1 some requests failed, 2 a run could not begin, 130 interrupted.
"""


@dataclass(frozen=True, slots=True)
class LevelRange:
    """Levels to measure one after the other: `start:end:step`, the end included."""

    levels: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "LevelRange":
        """Parse `4`, `1:8` or `1:16:4`. Raises LoadConfigError."""
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3:
            raise LoadConfigError(f"{text!r}: write START[:END[:STEP]], e.g. 1:16:4")
        start, last = numbers[0], numbers[min(1, len(numbers) - 1)]
        by = numbers[2] if len(numbers) == 3 else 1.0
        if not (0 < start <= last and by > 0):
            raise LoadConfigError(f"{text!r}: must be above 0, and END at least START")
        return cls(tuple(start + by * number for number in range(int((last - start) / by) + 1)))


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
    """One level: its run, and where the server spent the time; None for a server without statistics."""

    level: float
    run: Run
    batch_size: int
    split: ServerSplit | None

    @property
    def inferences_per_s(self) -> float:
        return self.run.summary.requests_per_s * self.batch_size


def perf_analyzer(argv: list[str]) -> int:
    """Measure each level, print what perf_analyzer prints, and write its CSV."""
    arguments = _parser().parse_args(argv)
    try:
        measurements = list(_measurements(arguments))
    except (LoadConfigError, RunError) as error:
        sys.stderr.write(f"sluice load perf-analyzer: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    if arguments.latency_report_file is not None:
        _write_csv(arguments.latency_report_file, measurements, is_rate=arguments.request_rate_range is not None)
    if any(each.run.was_interrupted for each in measurements):
        return INTERRUPTED
    return FAILED if any(each.run.summary.num_failed for each in measurements) else 0


def _parser() -> ForeignParser:
    options = ForeignParser("sluice load perf-analyzer", _DESCRIPTION, _EPILOG)
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
    add("-i", "--protocol", choices=("http", "HTTP"), default="http", help="HTTP alone (%(default)s)")
    add("-b", "--batch-size", type=at_least(1), default=1, metavar="N", help="first dimension of tensors (1)")
    pace = options.add_mutually_exclusive_group()
    levels = argument(LevelRange.parse)
    pace.add_argument(
        "-c", "--concurrency", "--concurrency-range", type=levels, metavar="START[:END[:STEP]]", help="at a time (1)"
    )
    pace.add_argument("--request-rate-range", type=levels, metavar="START[:END[:STEP]]", help="requests a second")
    add(
        "--request-distribution",
        choices=("constant", "poisson"),
        default="constant",
        help="gaps of --request-rate-range (%(default)s)",
    )
    duration = options.add_mutually_exclusive_group()
    duration.add_argument(
        "-d", "--duration", type=at_least(1), metavar="S", help="seconds of each level (--measurement-interval)"
    )
    duration.add_argument("--duration-ms", type=at_least(1), metavar="MS", help="the same in milliseconds")
    add("-p", "--measurement-interval", type=at_least(1), default=5000, metavar="MS", help="ms of a level (5000)")
    add("--request-count", type=at_least(1), metavar="N", help="requests of each level, instead of a time")
    add("--warmup-request-count", type=at_least(0), default=0, metavar="N", help="requests before each level (0)")
    add("--shape", type=argument(shape), action="append", default=[], metavar="NAME:D,D,...", help="of an input")
    add("--input-data", choices=("random",), default="random", help="tensors (%(default)s)")
    add("--input-tensor-format", choices=("binary", "json"), default="binary", help="as bytes, or as JSON")
    add("--collect-metrics", action="store_true", help="taken; the server's times are read always")
    options.ignore("--async", "--sync", "-a", "-v", "--verbose")
    options.ignore("-s", "--stability-percentage", "-r", "--max-trials", "--max-threads", has_value=True)
    options.refuse("`sluice load --api grpc_stream` measures streams", "--streaming")
    shared = "tensors travel in the request; `sluice load --api infer_binary` measures the same"
    options.refuse(shared, "--shared-memory", "--output-shared-memory-size")
    options.refuse("measure one load after the other with --concurrency-range", "--periodic-concurrency-range")
    options.refuse("the levels are all measured", "-l", "--latency-threshold", "--binary-search")
    options.refuse("sequences are no part of this client", "--num-of-sequences", "--sequence-length")
    add("--percentile", type=at_least(1), choices=(50, 90, 95, 99), metavar="N", help="show this, not the mean")
    add(
        "-f",
        "--f",
        "--latency-report-file",
        dest="latency_report_file",
        type=argument(new_file),
        metavar="FILE",
        help="write a CSV as perf_analyzer does",
    )
    return options


def _measurements(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Measure the levels, each printed when it has ended."""
    is_rate = arguments.request_rate_range is not None
    levels = (arguments.request_rate_range or arguments.concurrency or LevelRange((1.0,))).levels
    for level in levels:
        measurement = asyncio.run(_measure(_config(arguments, level, is_rate), level, arguments.batch_size))
        for line in _lines(measurement, is_rate, arguments.percentile):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        yield measurement
        if measurement.run.was_interrupted:
            return


def _config(arguments: argparse.Namespace, level: float, is_rate: bool) -> LoadConfig:
    url = http_url(arguments.url)
    duration_s = arguments.duration or (arguments.duration_ms or arguments.measurement_interval) / 1e3
    is_binary = arguments.input_tensor_format == "binary"
    return LoadConfig(
        LoadTarget(url, ApiKind.INFER_BINARY if is_binary else ApiKind.INFER, arguments.model_name),
        RequestPace(
            concurrency=None if is_rate else _whole(level),
            request_rate=level if is_rate else None,
            arrival=Arrival(arguments.request_distribution),
            num_requests=arguments.request_count,
            duration_s=None if arguments.request_count else float(duration_s),
            warmup=arguments.warmup_request_count,
        ),
        Workload(shapes=dict(arguments.shape), batch_size=arguments.batch_size),
    )


def _whole(level: float) -> int:
    if level != int(level):
        raise LoadConfigError(f"concurrency {level:g}: write a whole number")
    return int(level)


async def _measure(config: LoadConfig, level: float, batch_size: int) -> Measurement:
    before = await _statistics(config)
    run = await run_load(config)
    return Measurement(level, run, batch_size, _split(before, await _statistics(config)))


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


def _lines(measurement: Measurement, is_rate: bool, percentile: int | None) -> Iterator[str]:
    s = measurement.run.summary
    yield f"{'Request Rate' if is_rate else 'Request concurrency'}: {measurement.level:g}"
    yield f"  Client: {s.num_served} requests in {s.wall_s:.2f} s, {s.num_failed} failed"
    for label, failure in s.failures.items():
        yield f"    {label}: {failure.count}, first: {failure.example[:160]}"
    yield f"    Throughput: {measurement.inferences_per_s:.2f} infer/sec"
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
    shown = e2e.mean if percentile is None else getattr(e2e, f"p{percentile}")
    unit = "Request Rate" if is_rate else "Concurrency"
    yield (
        f"{unit}: {measurement.level:g}, throughput: {measurement.inferences_per_s:.2f} infer/sec, "
        f"latency {_us(shown)} usec"
    )


def bottleneck(split: ServerSplit, latency_ms: float) -> str:
    """Say in words where most of a request's time went."""
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


def _write_csv(path: Path, measurements: Sequence[Measurement], is_rate: bool) -> None:
    """Write perf_analyzer's columns. The client's own share is not told apart from the network's."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Request Rate" if is_rate else "Concurrency", *_CSV_COLUMNS])
        writer.writerows(map(_csv_row, measurements))


def _csv_row(each: Measurement) -> list[str]:
    e2e = each.run.summary.e2e_ms
    mean_us = (e2e.mean or 0.0) * 1e3
    split = each.split or ServerSplit(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    client_us, network_us = 0.0, max(0.0, mean_us - split.total_us)
    server_us = (split.queue_us, split.compute_input_us, split.compute_infer_us, split.compute_output_us)
    times = [f"{value:.0f}" for value in (client_us, network_us, *server_us, client_us)]
    return [
        f"{each.level:g}",
        f"{each.inferences_per_s:.2f}",
        *times,
        *(_us(value) for value in (e2e.p50, e2e.p90, e2e.p95, e2e.p99)),
    ]
