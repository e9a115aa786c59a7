"""`python -m benchmarks`, behind `make bench`: the figures of docs/performance.md."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import (
    adapter,
    decode,
    executor,
    experts,
    faults,
    gate_fill,
    guidance,
    install_size,
    isolation,
    kv_tiers,
    outages,
    predicted_wait,
    prefill_split,
    recovery,
    remote,
    routing,
    runtimes,
    sampling,
    scheduling,
    serving,
    speculation,
    suite,
    workers,
)
from benchmarks.figures import BenchmarkError, Figure, ReportProgress, print_figures, write_figures
from benchmarks.offline import comparison
from benchmarks.rag import (
    answers,
    encoder,
    ingestion,
    man_pages,
    orchestration,
    pipeline,
    quality,
    stores,
    stores_postgres,
)
from benchmarks.streaming import (
    beside_vllm,
    embeddings,
    flat_memory,
    load_clients,
    parsing,
    resumption,
    served,
    stalls,
    streams,
    vllm_overload,
)
from benchmarks.triton import comparison as triton
from benchmarks.triton import grpc as triton_grpc
from benchmarks.triton import perf_analyzer, queue_timeouts, reloading, sequences, steps, tuning
from sluice.gateway.checkpoint import find_checkpoint
from sluice.gateway.options.option import OptionError

DEFAULT = ("serving", "executor")
FILE_WIDTH = 140
DESCRIPTION = """\
Measure this Sluice on this machine. Compare figures only within one run: a busy machine is several times slower.

  serving       launch, memory, latency, throughput, gateway CPU; bundled model and random model S (2 minutes)
  executor      time of a step without its runner
  decode        steps of the runner alone on model M, bf16 and int8, in turns (a minute a repeat)
  runtimes      steps of torch on the CPU beside OpenVINO's, in float32, in turns: the bundled model and model M; --only
                bundled or M (3 minutes a repeat)
  adapter       time that the adapter to TensorRT-LLM adds to a step, and how full its batch is where prompts share a
                prefix (a minute)
  guidance      time to compile grammars, and the masks of a step with 64 guided sequences
  experts       a layer of experts in its two forms, for 1 to 512 tokens (5 minutes)
  sampling      time that sampling adds to greedy decoding, vocabularies of 8,192 and 150,000
  install-size  size of `pip install .` in a fresh environment (downloads; a minute)
  offline       batch throughput and latency of one stream beside vLLM and OpenVINO GenAI, which it installs
                under --out into environments of their own (5.3 GB); 15 minutes
  recovery      kill -9 of the engine under 32 streams: pause, recovery time, equality of the answers
  outages       a fleet: one of two replicas killed (-9), hung, or its machine silent, under 32 streams, and a minute
                without the Redis that names the engines, which needs redis-server (2 minutes, and 1 a repeat)
  faults        the same faults on Sluice and on vLLM, transformers' server, llama.cpp, smg and LiteLLM, which it
                installs under --out (5 GB; llama.cpp is compiled by cmake and ninja): clients that leave, overload,
                kill -9, SIGSTOP, garbage, a small KV cache, startup; --only takes names of faults and servers (10
                minutes a server)
  isolation     hostile requests beside a stream and a poller of /health: longest stalls, memory (3 minutes)
  scheduling    policies under overload, forecast of waits, fair shares, a long queue, chunked prefill (5 minutes)
  predicted-wait  the predicted wait beside the actual one and what is refused by it, 14 kinds of load, in simulated
                time, with the bundled model and with a fleet of two; --only simulated, model or fleet (15 minutes a
                repeat)
  routing       microseconds of a router's choice, a simulated fleet of 8 under each router, the same under Dynamo's and
                smg's, which it installs under --out (0.5 GB), two replicas of model M with shared prefixes, and the
                simulation beside a measured server; --only decisions, fleets, peers, live or measured (20 minutes, and
                8 a repeat)
  remote        gateway CPU for a token of an engine over TCP, beside one of its own; needs a C compiler (a minute a
                repeat)
  speculation   prompt lookup on text that is copied and on text that cannot be predicted
  kv-tiers      conversations that exceed the KV cache, without tiers, with memory, with disk; model M (5 minutes)
  prefill-split running streams beside long prompts, with and without a prefill replica of two (a minute a repeat)
  triton        the v2 protocol beside tritonserver 2.51, which it installs under --out; needs wrk (20 minutes)
  grpc          gRPC beside tritonserver and beside the server of the grpc package, by h2load (8 minutes)
  steps         a 10 MB tensor between two steps of an ensemble
  sequences     100,000 requests over 1,000 sequences at once: right answers and rate
  tuning        a text pipeline tuned step by step as in a guide, and the gain of batching for its encoder; needs wrk
  reloading     memory, open files and processes over 1,000 loads and unloads, for each backend (10 minutes)
  queue-timeouts lateness of rejections after a timeout in a queue, 64 clients (a minute)
  perf-analyzer NVIDIA's load generator against this Sluice, over HTTP, gRPC, streams and shared memory (a minute)
  rag-quality   rank of the right passage of 15,000, for 332 questions; ingestion (10 minutes)
  rag-answers   answers of the bundled model with and without retrieval, three sets of questions (10 minutes)
  rag-man-pages answers of the bundled model to questions about manual pages (2 minutes)
  rag-ingestion chunks/s over HTTP, and the gaps of a stream and of /health meanwhile (2 minutes)
  rag-stores    100,000 vectors in SQLite beside numpy: recall, latency, insertion (10 minutes)
  rag-postgres  the same in Postgres with pgvector, random and clustered vectors (30 minutes)
  rag-encoder   the sentence encoder with and without dynamic batching, 1, 16 and 64 clients; needs wrk (5 minutes)
  rag-pipeline  the pipeline as one request, beside a client that calls its steps (2 minutes)
  rag-steps     microseconds that an ensemble adds to each of its steps
  streams       the gateway on one core, with an engine that computes nothing: tokens/s, CPU and memory of 1, 64, 512
                and 2,000 streams; needs a C compiler, as do those below but `tools` (3 minutes a repeat)
  beside-vllm   the same front end, and the bundled model, beside vLLM's server, which it installs under --out (3.2
                GB), in turns (5 minutes, and 4 a repeat)
  served-m      model M in bf16 beside vLLM's server, 8 and 32 streams, in turns (5 minutes, and 5 a repeat)
  vllm-overload  vLLM behind Sluice beside vLLM's server, one small cache: preemptions, tokens/s, pauses, and what
                Sluice adds at few streams (5 minutes, and 4 a repeat)
  tools         microseconds that finding tool calls and reasoning adds to a token, for each format (a minute)
  embeddings    /v1/embeddings beside Sentence Transformers, which it installs under --out (1.5 GB), on one encoder
  flat-memory   memory of gateway and engine over --requests requests (20,000: 2 minutes; 1,000,000: an hour)
  resumption    10,000 streams cut at random bytes, at one gateway, and at two of which one is killed: lost and repeated
                events, memory, CPU time; the latter need redis-server (5 minutes)
  stalls        the longest gap of streams beside a prompt of 60,000 tokens and a body of 20 MB (2 minutes)
  load-clients  `sluice load` beside NVIDIA's AIPerf, which it installs under --out, on the same server in turns: how
                far their figures differ (5 minutes)
  workers       requests/s with one gateway process and with two (--http-workers), an engine that computes nothing;
                needs wrk (3 minutes a repeat)
  suite         this repository's tests: lines, cases, seconds, branches that they run, seeded faults that they find;
                --only lines, quick, test, coverage or faults (40 minutes)
  peer          the serving workloads against the server at --peer-url
"""


def main(argv: list[str]) -> int:
    """Run the named benchmarks, print their figures and write them under --out."""
    arguments = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    known = _benchmarks(arguments, lambda line: console.print(f"  {line}", highlight=False))
    unknown = set(arguments.names) - known.keys()
    if unknown:
        sys.stderr.write(f"benchmarks: no {', '.join(sorted(unknown))}; there are {', '.join(known)}\n")
        return 2
    load_before = os.getloadavg()[0]
    figures: list[Figure] = []
    try:
        for name in arguments.names or DEFAULT:
            console.print(f"measuring {name} ...", highlight=False)
            figures += known[name]()
    except (BenchmarkError, OptionError) as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 1
    print_figures(figures, console)
    file = write_figures(figures, arguments.out, load_before)
    console.print(f"written to {file}; load average before: {load_before:.1f}", highlight=False)
    return 0


def _benchmarks(arguments: argparse.Namespace, report: ReportProgress) -> dict[str, Callable[[], list[Figure]]]:
    repeats = arguments.repeats
    return {
        "serving": lambda: serving.measure(repeats, arguments.out, arguments.model),
        "executor": lambda: executor.measure(repeats),
        "decode": lambda: decode.measure(repeats, arguments.out, report),
        "runtimes": lambda: runtimes.measure(repeats, arguments.out, arguments.only, report),
        "adapter": lambda: [*adapter.measure(repeats), *gate_fill.measure()],
        "guidance": lambda: guidance.measure(repeats),
        "experts": lambda: experts.measure(repeats),
        "sampling": lambda: sampling.measure(repeats),
        "install-size": lambda: install_size.measure(arguments.out),
        "offline": lambda: comparison.measure(repeats, arguments.out),
        "recovery": lambda: recovery.measure(repeats, arguments.out, arguments.model),
        "outages": lambda: outages.measure(repeats, arguments.out, arguments.model, report),
        "faults": lambda: faults.measure(arguments.out, arguments.vllm_python, arguments.only, report),
        "isolation": lambda: isolation.measure(repeats, arguments.out, arguments.model, arguments.only, report),
        "scheduling": lambda: scheduling.measure(repeats, arguments.out, arguments.model),
        "predicted-wait": lambda: predicted_wait.measure(repeats, arguments.model, arguments.only, report),
        "routing": lambda: routing.measure(repeats, arguments.out, arguments.model, arguments.only, report),
        "remote": lambda: remote.measure(repeats, arguments.out, report),
        "speculation": lambda: speculation.measure(repeats, arguments.model or find_checkpoint(None)),
        "prefill-split": lambda: prefill_split.measure(repeats, arguments.model, report),
        "kv-tiers": lambda: kv_tiers.measure(repeats, arguments.out, arguments.model, report),
        "triton": lambda: triton.measure(repeats, arguments.out, arguments.only, report),
        "grpc": lambda: triton_grpc.measure(repeats, arguments.out, report),
        "steps": lambda: steps.measure(repeats, arguments.out),
        "sequences": lambda: sequences.measure(arguments.out),
        "tuning": lambda: tuning.measure(repeats, arguments.out, report),
        "reloading": lambda: reloading.measure(arguments.out, report),
        "queue-timeouts": lambda: queue_timeouts.measure(repeats, arguments.out, report),
        "perf-analyzer": lambda: perf_analyzer.measure(arguments.out, report),
        "rag-quality": lambda: quality.measure(arguments.out, report),
        "rag-answers": lambda: answers.measure(arguments.out, report),
        "rag-man-pages": lambda: man_pages.measure(arguments.out, report),
        "rag-ingestion": lambda: ingestion.measure(repeats, arguments.out, report),
        "rag-stores": lambda: stores.measure(repeats, report),
        "rag-postgres": lambda: stores_postgres.measure(1, report),
        "rag-encoder": lambda: encoder.measure(repeats, arguments.out, report),
        "rag-pipeline": lambda: pipeline.measure(repeats, arguments.out, report),
        "rag-steps": lambda: orchestration.measure(repeats),
        "streams": lambda: streams.measure(repeats, arguments.out, arguments.only, report),
        "beside-vllm": lambda: beside_vllm.measure(repeats, arguments.out, report),
        "served-m": lambda: served.measure(repeats, arguments.out, arguments.only, report),
        "vllm-overload": lambda: vllm_overload.measure(repeats, arguments.out, report),
        "tools": lambda: parsing.measure(repeats, report),
        "embeddings": lambda: embeddings.measure(repeats, arguments.out, report),
        "flat-memory": lambda: flat_memory.measure(arguments.requests, arguments.out, report),
        "resumption": lambda: resumption.measure(arguments.out, report),
        "stalls": lambda: stalls.measure(repeats, arguments.out, arguments.only, report),
        "load-clients": lambda: load_clients.measure(repeats, arguments.out, arguments.only, report),
        "workers": lambda: workers.measure(repeats, arguments.out, report),
        "suite": lambda: suite.measure(arguments.out / "suite", arguments.only, report),
        "peer": lambda: _measure_peer(arguments),
    }


def _measure_peer(arguments: argparse.Namespace) -> list[Figure]:
    return serving.measure_peer(arguments.peer_url, arguments.peer_model, arguments.peer_vocab_size, arguments.repeats)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run; default: {' '.join(DEFAULT)}")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="number of repeats (%(default)s); medians are reported"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="checkpoint to serve instead of the bundled one")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="parts of `faults`, `isolation`, `predicted-wait`, `streams`, `stalls`, `triton`, `routing`, "
        "`runtimes`, `load-clients` and `suite` with TEXT",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=flat_memory.NUM_REQUESTS,
        metavar="N",
        help="requests of `flat-memory` (%(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/bench"),
        metavar="FOLDER",
        help="folder of results and installations (%(default)s)",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PYTHON",
        help="Python with vLLM for `faults`, such as build/vllm-venv/bin/python; default: installed under --out",
    )
    parser.add_argument(
        "--peer-url", default="http://127.0.0.1:8000", metavar="URL", help="server of `peer` (%(default)s)"
    )
    parser.add_argument("--peer-model", metavar="NAME", help="model of the peer; default: its first")
    parser.add_argument(
        "--peer-vocab-size", type=int, default=4096, metavar="N", help="vocabulary of that model (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
