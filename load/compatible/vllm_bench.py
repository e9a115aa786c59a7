"""The command `sluice load vllm-bench`: vLLM's `vllm bench serve` by its own flags."""

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sluice.addresses import host_and_port
from sluice.load.compatible.common import ForeignParser, Latencies, check_endpoint, deviation, mean, percentile, run_as
from sluice.load.config import (
    ApiKind,
    Arrival,
    LoadConfig,
    LoadConfigError,
    LoadTarget,
    RequestPace,
    Slo,
    TokenRange,
    Workload,
)
from sluice.load.intervals import Floats
from sluice.load.run import Run
from sluice.load.stream import RequestResult
from sluice.load.traces import read_trace
from sluice.load.values import argument, at_least, json_object, positive

_PROG = "sluice load vllm-bench"
_DESCRIPTION = """\
Measure a server as `vllm bench serve` does, by its own flags.

Latencies count from the intended send, so that with a --request-rate the wait for a place of --max-concurrency is part
of them; vLLM counts from the send. Prompts of /v1/completions are token ids, whose length is exact without a tokenizer.
"""
_EPILOG = """\
examples:
  sluice load vllm-bench --model rill --dataset-name random --random-input-len 256 --random-output-len 128 \\
      --num-prompts 64 --max-concurrency 16 --ignore-eos
  sluice load vllm-bench --backend openai-chat --dataset-name sharegpt --dataset-path ShareGPT.json --request-rate 4 \\
      --burstiness 0.5 --num-prompts 200 --goodput ttft:500 tpot:50 --save-result

Exit status: 0 all served, 1 some requests failed, 2 the run could not begin, 130 interrupted.
"""
_BACKENDS = {
    "openai": ApiKind.COMPLETIONS,
    "vllm": ApiKind.COMPLETIONS,
    "sglang": ApiKind.COMPLETIONS,
    "lmdeploy": ApiKind.COMPLETIONS,
    "scalellm": ApiKind.COMPLETIONS,
    "openai-chat": ApiKind.CHAT,
    "openai-embeddings": ApiKind.EMBEDDINGS,
    "vllm-rerank": ApiKind.RERANK,
    "tensorrt-llm": ApiKind.GENERATE_STREAM,
}
_SAMPLING = ("top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
_METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def vllm_bench(argv: list[str]) -> int:
    """Run, print the table of `vllm bench serve`, and write its JSON where it is asked for."""
    arguments = _parser().parse_args(argv[1:] if argv[:1] == ["serve"] else argv)
    return run_as(_PROG, partial(_config, arguments), partial(_show, arguments))


def _parser() -> ForeignParser:
    options = ForeignParser(_PROG, _DESCRIPTION, _EPILOG)
    _add_server(options)
    _add_dataset(options)
    _add_pace(options)
    _add_results(options)
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="sent with each request")
    options.add_argument("--logprobs", type=at_least(0), metavar="N", help="sent with each request")
    options.add_argument("--ignore-eos", action="store_true", help="let answers have their whole length")
    options.add_argument("--extra-body", type=argument(json_object), default={}, metavar="JSON", help="more fields")
    options.ignore("--disable-tqdm", "--trust-remote-code", "--no-stream", "--skip-chat-template", "--disable-shuffle")
    options.ignore("--tokenizer-mode", "--request-id-prefix", "--ready-check-timeout-sec", has_value=True)
    options.refuse("this client sends no beam searches", "--use-beam-search")
    options.refuse("profile a server of Sluice with `sluice profile`", "--profile")
    ramp = "use `sluice load --request-rate R --final-rate R --duration S`"
    options.refuse(ramp, "--ramp-up-strategy", "--ramp-up-start-rps", "--ramp-up-end-rps")
    options.refuse("name an adapter with --model", "--lora-modules")
    options.refuse("there are the datasets random, sharegpt and burstgpt", "--hf-name", "--hf-split", "--hf-subset")
    options.refuse("there are no probes beside the load", "--probe-request-rate")
    options.refuse("the report of `sluice load --html` has plots", "--plot-timeline", "--plot-dataset-stats")
    options.refuse("replay a trace at its times with `sluice load --trace FILE`", "--self-timed")
    return options


def _add_server(options: ForeignParser) -> None:
    add = options.add_argument
    add("--backend", "--endpoint-type", choices=list(_BACKENDS), default="openai", help="API (%(default)s)")
    add("--base-url", metavar="URL", help="the server, in place of --host and --port")
    add("--host", default="127.0.0.1", help="%(default)s")
    add("--port", type=at_least(1), default=8000, help="%(default)s")
    add("--endpoint", metavar="PATH", help="the API's own path; a prefix of it belongs into --base-url")
    add("--model", metavar="MODEL", help="default: the first of /v1/models")
    add("--served-model-name", metavar="NAME", help="the model's name at the server, in place of --model")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json or its folder, for text prompts of exact length")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers to send")
    add("--label", metavar="NAME", help="beginning of the result's file name (the backend)")


def _add_dataset(options: ForeignParser) -> None:
    add = options.add_argument
    add("--dataset-name", choices=("random", "sharegpt", "burstgpt"), default="random", help="%(default)s")
    add("--dataset-path", type=Path, metavar="FILE", help="of sharegpt and burstgpt")
    add("--num-prompts", type=at_least(1), default=1000, metavar="N", help="requests (%(default)s)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="%(default)s")
    add("--random-input-len", "--input-len", type=at_least(1), default=1024, metavar="N", help="%(default)s")
    add("--random-output-len", "--output-len", type=at_least(1), default=128, metavar="N", help="%(default)s")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths from (1-R) to (1+R) times (0)")
    add("--random-prefix-len", type=at_least(0), default=0, metavar="N", help="shared tokens before each prompt (0)")
    add("--vocab-size", type=at_least(2), default=4096, metavar="N", help="draw token ids below N (%(default)s)")
    reason = "answers have the lengths of the dataset; use `sluice load --trace` with --output-tokens"
    options.refuse(reason, "--sharegpt-output-len")


def _add_pace(options: ForeignParser) -> None:
    add = options.add_argument
    add("--request-rate", default="inf", metavar="R", help="requests a second; inf: all at once (%(default)s)")
    add("--burstiness", type=argument(positive), default=1.0, metavar="K", help="shape of gamma gaps (1: Poisson)")
    add("--max-concurrency", type=at_least(1), metavar="N", help="most requests at a time")
    add("--num-warmups", type=at_least(0), default=0, metavar="N", help="requests before the run (0)")
    add("--processes", type=at_least(1), default=1, metavar="N", help="processes of this client (%(default)s)")


def _add_results(options: ForeignParser) -> None:
    add = options.add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="ttft, tpot, itl, e2el (%(default)s)")
    add("--metric-percentiles", default="99", metavar="P,P,...", help="%(default)s")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="targets: ttft, tpot, e2el")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request in it")
    add("--append-result", action="store_true", help="append the JSON to the file")
    add("--result-dir", type=Path, default=Path(), metavar="FOLDER", help="where the file goes (.)")
    add("--result-filename", metavar="NAME", help="its name")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="fields of the file")


def _config(arguments: argparse.Namespace) -> LoadConfig:
    api = _BACKENDS[arguments.backend]
    check_endpoint(arguments.endpoint, api)
    _check_metrics(arguments)
    url = arguments.base_url or f"http://{host_and_port(arguments.host, arguments.port)}"
    headers = tuple(_pair(each, "--header") for each in arguments.header)
    target = LoadTarget(url.rstrip("/"), api, arguments.served_model_name or arguments.model, headers)
    return LoadConfig(
        target, _pace(arguments), _workload(arguments), _slo(arguments.goodput), num_processes=arguments.processes
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    fields = {name: getattr(arguments, name) for name in (*_SAMPLING, "logprobs")}
    prefix = arguments.random_prefix_len
    prompt = _around(arguments.random_input_len, arguments.random_range_ratio)
    return Workload(
        prompt_tokens=TokenRange(prompt.low + prefix, prompt.high + prefix),
        output_tokens=_around(arguments.random_output_len, arguments.random_range_ratio),
        seed=arguments.seed,
        vocab_size=arguments.vocab_size,
        tokenizer=Path(arguments.tokenizer) if arguments.tokenizer is not None else None,
        ignore_eos=arguments.ignore_eos,
        extra_body={name: value for name, value in fields.items() if value is not None} | arguments.extra_body,
        prefix_tokens=prefix,
        trace=_trace(arguments),
    )


def _trace(arguments: argparse.Namespace) -> Path | None:
    name: str = arguments.dataset_name
    path: Path | None = arguments.dataset_path
    if (name == "random") != (path is None):
        raise LoadConfigError("--dataset-path goes with --dataset-name sharegpt and burstgpt, which need it")
    return path


def _around(length: int, ratio: float) -> TokenRange:
    if not 0.0 <= ratio < 1.0:
        raise LoadConfigError(f"--random-range-ratio {ratio:g}: write a number from 0 to below 1")
    return TokenRange(max(1, int(length * (1 - ratio))), max(1, round(length * (1 + ratio))))


def _pace(arguments: argparse.Namespace) -> RequestPace:
    number = arguments.num_prompts
    if arguments.dataset_path is not None:
        number = min(number, len(read_trace(arguments.dataset_path)))
    if arguments.request_rate == "inf":
        concurrency = arguments.max_concurrency or number
        return RequestPace(concurrency=concurrency, num_requests=number, warmup=arguments.num_warmups)
    return RequestPace(
        concurrency=arguments.max_concurrency,
        request_rate=positive(arguments.request_rate),
        arrival=Arrival.POISSON if arguments.burstiness == 1.0 else Arrival.GAMMA,
        burstiness=arguments.burstiness,
        num_requests=number,
        warmup=arguments.num_warmups,
    )


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise LoadConfigError(f"{flag} {text!r}: write KEY=VALUE")
    return name, value


def _slo(targets: Sequence[str]) -> Slo | None:
    """Read targets such as `ttft:200`."""
    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2e_ms"}
    found: dict[str, float] = {}
    for target in targets:
        name, _, value = target.partition(":")
        if name not in names:
            raise LoadConfigError(f"--goodput {target!r}: write NAME:MS of {', '.join(names)}")
        found[names[name]] = positive(value)
    return Slo(**found) if found else None


def _check_metrics(arguments: argparse.Namespace) -> None:
    unknown = set(arguments.percentile_metrics.split(",")) - _METRICS.keys()
    if unknown:
        raise LoadConfigError(f"--percentile-metrics {min(unknown)}: there are {', '.join(_METRICS)}")
    for percent in arguments.metric_percentiles.split(","):
        if not 0 < positive(percent) <= 100:
            raise LoadConfigError(f"--metric-percentiles {percent}: write numbers up to 100")


def _show(arguments: argparse.Namespace, run: Run) -> None:
    latencies = Latencies.of(run.results)
    print("\n".join(_table(arguments, run, latencies)))  # noqa: T201 - the table is the command's output
    if not (arguments.save_result or arguments.append_result):
        return
    arguments.result_dir.mkdir(parents=True, exist_ok=True)
    file = arguments.result_dir / (arguments.result_filename or _file_name(arguments, run))
    document = msgspec.json.encode(_document(arguments, run, latencies)) + b"\n"
    with file.open("ab" if arguments.append_result else "wb") as opened:
        opened.write(document)


def _table(arguments: argparse.Namespace, run: Run, latencies: Latencies) -> Iterator[str]:
    yield "{s:=^50}".format(s=" Serving Benchmark Result ")
    for name, value in _figures(arguments, run):
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        yield f"{name:<40} {text:<10}"
    for name in arguments.percentile_metrics.split(","):
        title, short = _METRICS[name]
        values = _values(latencies)[name]
        if not values.size:
            continue
        yield f"{title:-^50}"
        yield f"{f'Mean {short} (ms):':<40} {mean(values):<10.2f}"
        yield f"{f'Median {short} (ms):':<40} {percentile(values, 50):<10.2f}"
        for percent in map(float, arguments.metric_percentiles.split(",")):
            yield f"{f'P{percent:g} {short} (ms):':<40} {percentile(values, percent):<10.2f}"
    yield "=" * 50
    for label, failure in run.summary.failures.items():
        yield f"{label}: {failure.count}, first: {failure.example[:160]}"


def _values(latencies: Latencies) -> dict[str, Floats]:
    return {"ttft": latencies.ttft, "tpot": latencies.tpot, "itl": latencies.itl, "e2el": latencies.e2e}


def _figures(arguments: argparse.Namespace, run: Run) -> Iterator[tuple[str, int | float]]:
    s = run.summary
    yield "Successful requests:", s.num_served
    yield "Failed requests:", s.num_failed
    if arguments.max_concurrency is not None:
        yield "Maximum request concurrency:", arguments.max_concurrency
    if arguments.request_rate != "inf":
        yield "Request rate configured (RPS):", float(arguments.request_rate)
    yield "Benchmark duration (s):", s.wall_s
    yield "Total input tokens:", s.prompt_tokens
    yield "Total generated tokens:", s.output_tokens
    yield "Request throughput (req/s):", s.requests_per_s
    if s.goodput_per_s is not None:
        yield "Request goodput (req/s):", s.goodput_per_s
    yield "Output token throughput (tok/s):", s.output_tokens_per_s
    yield "Peak concurrent requests:", _peak_concurrency(run.results)
    yield "Total token throughput (tok/s):", _total_rate(run)


def _total_rate(run: Run) -> float:
    s = run.summary
    return (s.prompt_tokens + s.output_tokens) / s.wall_s if s.wall_s else 0.0


def _peak_concurrency(results: Sequence[RequestResult]) -> int:
    if not results:
        return 0
    moments = [(result.started_s, 1) for result in results] + [(result.ended_s, -1) for result in results]
    return int(np.cumsum([change for _, change in sorted(moments)]).max())


def _file_name(arguments: argparse.Namespace, run: Run) -> str:
    crowd = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    model = run.model.rpartition("/")[2]
    return f"{arguments.label or arguments.backend}-{arguments.request_rate}qps{crowd}-{model}-{moment}.json"


def _document(arguments: argparse.Namespace, run: Run, latencies: Latencies) -> dict[str, Any]:
    s = run.summary
    document: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": run.model,
        "tokenizer_id": arguments.tokenizer,
        "num_prompts": s.num_requests,
        **dict(_pair(each, "--metadata") for each in arguments.metadata),
        "request_rate": arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "duration": s.wall_s,
        "completed": s.num_served,
        "failed": s.num_failed,
        "total_input_tokens": s.prompt_tokens,
        "total_output_tokens": s.output_tokens,
        "request_throughput": s.requests_per_s,
        "request_goodput": s.goodput_per_s,
        "output_throughput": s.output_tokens_per_s,
        "total_token_throughput": _total_rate(run),
        "max_concurrent_requests": _peak_concurrency(run.results),
    }
    for name in arguments.percentile_metrics.split(","):
        values = _values(latencies)[name]
        document |= {
            f"mean_{name}_ms": mean(values),
            f"median_{name}_ms": percentile(values, 50),
            f"std_{name}_ms": deviation(values),
        }
        for percent in map(float, arguments.metric_percentiles.split(",")):
            document[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
    return document | (_details(run.results) if arguments.save_detailed else {})


def _details(results: Sequence[RequestResult]) -> dict[str, Any]:
    ordered = sorted(results, key=lambda result: result.planned.index)
    return {
        "input_lens": [result.prompt_tokens or result.planned.prompt_tokens for result in ordered],
        "output_lens": [result.output_tokens for result in ordered],
        "ttfts": [result.ttft_s or 0.0 for result in ordered],
        "itls": [np.diff(np.asarray(result.event_times_s)).tolist() for result in ordered],
        "errors": ["" if result.failure is None else json.dumps(result.failure.detail) for result in ordered],
    }
