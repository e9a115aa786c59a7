"""The command `sluice load genai-perf`: NVIDIA's GenAI-Perf by its own flags."""

import argparse
import csv
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from sluice.load.compatible.common import ForeignParser, Latencies, check_endpoint, http_url, note, run_as
from sluice.load.config import (
    ApiKind,
    LoadConfig,
    LoadConfigError,
    LoadTarget,
    RequestPace,
    SecondsRange,
    Slo,
    TokenRange,
    TurnRange,
    Workload,
)
from sluice.load.intervals import Floats
from sluice.load.report import report_console
from sluice.load.run import Run
from sluice.load.values import argument, at_least, header, positive

_PROG = "sluice load genai-perf"
_DESCRIPTION = """\
Measure a server as `genai-perf profile` does, by its own flags.

A standard deviation above 0 gives lengths of a uniform distribution with that mean and deviation, and delays likewise.
Each request has a prompt of its own. Files are written where --artifact-dir or --profile-export-file is given.
"""
_EPILOG = """\
examples:
  sluice load genai-perf profile -m rill --endpoint-type chat --streaming --synthetic-input-tokens-mean 128 \\
      --output-tokens-mean 64 --concurrency 8 --request-count 100 -u localhost:8000
  sluice load genai-perf profile -m rill --endpoint-type chat --streaming --session-concurrency 4 --num-sessions 20 \\
      --session-turns-mean 3 --session-turn-delay-mean 500

Exit status: 0 all served, 1 some requests failed, 2 the run could not begin, 130 interrupted.
"""
_ENDPOINTS = {
    "chat": ApiKind.CHAT,
    "multimodal": ApiKind.CHAT,
    "completions": ApiKind.COMPLETIONS,
    "embeddings": ApiKind.EMBEDDINGS,
    "rankings": ApiKind.RERANK,
    "generate": ApiKind.GENERATE_STREAM,
    "kserve": ApiKind.GRPC_STREAM,
}
_UNKNOWN_TOKENS = 128
"""Length of answers without --output-tokens-mean, up to which a model may stop where it likes."""
_PERCENTS = (99, 95, 90, 75, 50, 25)


class _Metric(NamedTuple):
    """A row of the table: one value for each request, or one of the run."""

    title: str
    key: str
    unit: str
    values: Floats


def genai_perf(argv: list[str]) -> int:
    """Run, print GenAI-Perf's table, and write its files where they are asked for."""
    arguments = _parser().parse_args(argv[1:] if argv[:1] == ["profile"] else argv)
    api = _ENDPOINTS[arguments.endpoint_type]
    if not arguments.streaming and api in (ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.GENERATE_STREAM):
        note(_PROG, "without --streaming answers are streamed all the same, and only whole requests are shown")
    return run_as(_PROG, partial(_config, arguments), partial(_show, arguments))


def _parser() -> ForeignParser:
    options = ForeignParser(_PROG, _DESCRIPTION, _EPILOG)
    _add_endpoint(options)
    _add_input(options)
    _add_pace(options)
    _add_output(options)
    options.ignore("-v", "--verbose", "--tokenizer-trust-remote-code", "--generate-plots")
    options.ignore("--service-kind", "--backend", "--num-dataset-entries", "--num-prompts", has_value=True)
    options.ignore("--tokenizer-revision", "-s", "--stability-percentage", has_value=True)
    options.refuse("use `sluice load --trace FILE`", "--input-file", "--fixed-schedule")
    options.refuse("one text in each request", "-b", "--batch-size", "--batch-size-text", "--batch-size-image")
    options.refuse("this client sends no audio", "--audio-length-mean", "--audio-length-stddev", "--batch-size-audio")
    options.refuse("one model in each run", "--model-selection-strategy")
    options.refuse("`sluice load --metrics-url URL` reads the server's metrics", "--server-metrics-url")
    return options


def _add_endpoint(options: ForeignParser) -> None:
    add = options.add_argument
    add("-m", "--model", "--model-names", required=True, metavar="MODEL", help="the model")
    add("--endpoint-type", choices=list(_ENDPOINTS), default="kserve", help="API (%(default)s)")
    add("--endpoint", metavar="PATH", help="the API's own path; a prefix of it belongs into --url")
    add("-u", "--url", metavar="HOST:PORT", help="the server (localhost:8001 for kserve, else localhost:8000)")
    add("--streaming", action="store_true", help="show the times of tokens")
    add("-H", "--header", type=argument(header), action="append", default=[], metavar="'NAME: VALUE'", help="to send")
    add("--extra-inputs", action="append", default=[], metavar="NAME:VALUE", help="a field of each request, or JSON")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json or its folder, for text prompts of exact length")


def _add_input(options: ForeignParser) -> None:
    add, whole = options.add_argument, at_least(0)
    add("--synthetic-input-tokens-mean", "--isl", type=at_least(1), default=550, metavar="N", help="(%(default)s)")
    add("--synthetic-input-tokens-stddev", type=whole, default=0, metavar="N", help="(%(default)s)")
    add("--output-tokens-mean", "--osl", type=int, default=-1, metavar="N", help="-1: up to 128 (%(default)s)")
    add("--output-tokens-stddev", type=whole, default=0, metavar="N", help="(%(default)s)")
    add("--output-tokens-mean-deterministic", action="store_true", help="send ignore_eos, for exact lengths")
    add("--random-seed", type=whole, default=0, metavar="N", help="(%(default)s)")
    add("--num-prefix-prompts", "--num-system-prompts", type=whole, default=0, metavar="N", help="shared starts (0)")
    add("--prefix-prompt-length", "--system-prompt-length", type=at_least(1), default=100, metavar="N", help="(100)")
    add("--image-width-mean", type=whole, default=0, metavar="PIXELS", help="of a random PNG in each turn (0: none)")
    add("--image-height-mean", type=whole, default=0, metavar="PIXELS", help="(0: none)")
    add("--num-sessions", type=at_least(1), metavar="N", help="conversations")
    add("--session-turns-mean", type=at_least(1), default=1, metavar="N", help="turns of each (%(default)s)")
    add("--session-turns-stddev", type=whole, default=0, metavar="N", help="(%(default)s)")
    add("--session-turn-delay-mean", type=whole, default=0, metavar="MS", help="before each later turn (0)")
    add("--session-turn-delay-stddev", type=whole, default=0, metavar="MS", help="(%(default)s)")


def _add_pace(options: ForeignParser) -> None:
    add = options.add_argument
    pace = options.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", "--session-concurrency", type=at_least(1), metavar="N", help="at a time (1)")
    pace.add_argument("--request-rate", type=argument(positive), metavar="R", help="requests a second (poisson)")
    add("--request-count", "--num-requests", type=at_least(1), metavar="N", help="requests, in place of a time")
    add("--warmup-request-count", type=at_least(0), default=0, metavar="N", help="requests before the run (0)")
    add("-p", "--measurement-interval", type=at_least(1), default=10000, metavar="MS", help="length of the run (10000)")
    add("--processes", type=at_least(1), default=1, metavar="N", help="processes of this client (%(default)s)")


def _add_output(options: ForeignParser) -> None:
    add = options.add_argument
    add("--goodput", "-g", nargs="+", default=[], metavar="NAME:MS", help="targets: " + ", ".join(_TARGETS))
    add("--artifact-dir", type=Path, metavar="FOLDER", help="write JSON and CSV there")
    add("--profile-export-file", type=Path, metavar="NAME", help="their name (profile_export.json)")


_TARGETS = {"time_to_first_token": "ttft_ms", "inter_token_latency": "tpot_ms", "request_latency": "e2e_ms"}


def _config(arguments: argparse.Namespace) -> LoadConfig:
    api = _ENDPOINTS[arguments.endpoint_type]
    check_endpoint(arguments.endpoint, api)
    url = http_url(arguments.url or ("localhost:8001" if api is ApiKind.GRPC_STREAM else "localhost:8000"))
    is_rate = arguments.request_rate is not None
    number = arguments.num_sessions or arguments.request_count
    pace = RequestPace(
        concurrency=None if is_rate else arguments.concurrency or 1,
        request_rate=arguments.request_rate,
        num_requests=number,
        duration_s=None if number else arguments.measurement_interval / 1e3,
        warmup=arguments.warmup_request_count,
    )
    target = LoadTarget(url, api, arguments.model, tuple(arguments.header))
    workload = _workload(arguments)
    return LoadConfig(target, pace, workload, _slo(arguments.goodput), num_processes=arguments.processes)


def _workload(arguments: argparse.Namespace) -> Workload:
    prefix = arguments.prefix_prompt_length if arguments.num_prefix_prompts else 0
    prompt = _tokens(arguments.synthetic_input_tokens_mean, arguments.synthetic_input_tokens_stddev)
    output = arguments.output_tokens_mean if arguments.output_tokens_mean > 0 else _UNKNOWN_TOKENS
    turns = _uniform(arguments.session_turns_mean, arguments.session_turns_stddev)
    delay = _uniform(arguments.session_turn_delay_mean, arguments.session_turn_delay_stddev)
    size = (arguments.image_width_mean, arguments.image_height_mean)
    if (size[0] > 0) != (size[1] > 0):
        raise LoadConfigError("--image-width-mean and --image-height-mean go together")
    return Workload(
        prompt_tokens=TokenRange(prompt.low + prefix, prompt.high + prefix),
        output_tokens=_tokens(output, arguments.output_tokens_stddev),
        seed=arguments.random_seed,
        tokenizer=Path(arguments.tokenizer) if arguments.tokenizer is not None else None,
        ignore_eos=arguments.output_tokens_mean_deterministic,
        extra_body=_extra_inputs(arguments.extra_inputs),
        prefix_tokens=prefix,
        num_prefixes=max(1, arguments.num_prefix_prompts),
        turns=TurnRange(max(1, round(turns[0])), max(1, round(turns[1]))),
        think_s=SecondsRange(max(0.0, delay[0]) / 1e3, delay[1] / 1e3),
        num_images=1 if size[0] else 0,
        image_size=size if size[0] else (512, 512),
    )


def _uniform(mean: float, deviation: float) -> tuple[float, float]:
    """Return the ends of the uniform distribution with this mean and standard deviation."""
    half = math.sqrt(3.0) * deviation
    return mean - half, mean + half


def _tokens(mean: int, deviation: int) -> TokenRange:
    low, high = _uniform(mean, deviation)
    return TokenRange(max(1, round(low)), max(1, round(high)))


def _extra_inputs(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            found |= _json(text, text)
            continue
        name, colon, value = text.partition(":")
        if not colon:
            raise LoadConfigError(f"--extra-inputs {text!r}: write NAME:VALUE or a JSON object")
        found[name] = _json(value, value)
    return found


def _json(text: str, otherwise: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _slo(targets: list[str]) -> Slo | None:
    found: dict[str, float] = {}
    for target in targets:
        name, _, value = target.partition(":")
        if name not in _TARGETS:
            raise LoadConfigError(f"--goodput {target!r}: write NAME:MS of {', '.join(_TARGETS)}")
        found[_TARGETS[name]] = positive(value)
    return Slo(**found) if found else None


def _show(arguments: argparse.Namespace, run: Run) -> None:
    metrics = list(_metrics(run, arguments.streaming))
    table = Table(title="LLM metrics, as GenAI-Perf has them")
    table.add_column("Statistic", justify="right")
    for name in ("avg", "min", "max", "p99", "p90", "p75"):
        table.add_column(name, justify="right")
    for metric in metrics:
        numbers = _statistics(metric.values)
        cells = [f"{numbers[name]:,.2f}" for name in ("avg", "min", "max", "p99", "p90", "p75") if name in numbers]
        table.add_row(f"{metric.title} ({metric.unit})", *cells, *["N/A"] * (6 - len(cells)))
    console = report_console()
    console.print(table)
    for label, failure in run.summary.failures.items():
        console.print(f"{label}: {failure.count}, first: {failure.example[:160]}", markup=False, highlight=False)
    _write(arguments, run, metrics)


def _metrics(run: Run, is_streaming: bool) -> Iterator[_Metric]:
    latencies, s = Latencies.of(run.results), run.summary
    served = [result for result in run.results if result.is_ok]
    if is_streaming:
        yield _Metric("Time To First Token", "time_to_first_token", "ms", latencies.ttft)
        yield _Metric("Time To Second Token", "time_to_second_token", "ms", latencies.second_token)
    yield _Metric("Request Latency", "request_latency", "ms", latencies.e2e)
    if is_streaming:
        yield _Metric("Inter Token Latency", "inter_token_latency", "ms", latencies.tpot)
        per_user = 1e3 / latencies.tpot[latencies.tpot > 0]
        title = "Output Token Throughput Per User"
        yield _Metric(title, "output_token_throughput_per_user", "tokens/sec/user", per_user)
    lengths = np.array([each.output_tokens for each in served], np.float64)
    yield _Metric("Output Sequence Length", "output_sequence_length", "tokens", lengths)
    prompts = [each.prompt_tokens or each.planned.prompt_tokens for each in served]
    yield _Metric("Input Sequence Length", "input_sequence_length", "tokens", np.array(prompts, np.float64))
    once = {
        ("Output Token Throughput", "output_token_throughput", "tokens/sec"): s.output_tokens_per_s,
        ("Request Throughput", "request_throughput", "requests/sec"): s.requests_per_s,
        ("Request Count", "request_count", "count"): float(s.num_served),
    }
    if s.goodput_per_s is not None:
        once["Request Goodput", "request_goodput", "requests/sec"] = s.goodput_per_s
    for (title, key, unit), value in once.items():
        yield _Metric(title, key, unit, np.array([value]))


def _statistics(values: Floats) -> dict[str, float]:
    """Return the statistics of a metric: the average alone of one that has one value for the run."""
    if values.size == 0:
        return {}
    found = {"avg": float(values.mean())}
    if values.size == 1:
        return found
    percentiles = dict(zip(_PERCENTS, np.percentile(values, _PERCENTS).tolist(), strict=True))
    found |= {f"p{percent}": value for percent, value in percentiles.items()}
    return found | {"min": float(values.min()), "max": float(values.max()), "std": float(values.std())}


def _write(arguments: argparse.Namespace, run: Run, metrics: list[_Metric]) -> None:
    if arguments.artifact_dir is None and arguments.profile_export_file is None:
        return
    folder = arguments.artifact_dir or Path()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (arguments.profile_export_file or Path("profile_export.json")).with_suffix("")
    rows = {each.key: {"unit": each.unit, **_statistics(each.values)} for each in metrics}
    given = {name: str(value) for name, value in vars(arguments).items() if name != "header"}
    document = msgspec.json.encode({**rows, "input_config": given, "model": run.model})
    stem.with_name(f"{stem.name}_genai_perf.json").write_bytes(msgspec.json.format(document, indent=2))
    with stem.with_name(f"{stem.name}_genai_perf.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = ("avg", "min", "max", *(f"p{percent}" for percent in _PERCENTS))
        writer.writerow(["Metric", *names])
        for each in metrics:
            numbers = _statistics(each.values)
            writer.writerow([f"{each.title} ({each.unit})", *(f"{numbers.get(name, 0.0):.2f}" for name in names)])
