"""The command line of `sluice tune`: its options, their help and the parsers of their values."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sluice.gateway.options.option import OneLineParser
from sluice.load.config import ApiKind, Slo, TokenRange
from sluice.load.options import add_prompts
from sluice.load.values import argument, at_least, positive
from sluice.tuning.errors import TuneError
from sluice.tuning.figures import FigureConstraint, Objective
from sluice.tuning.space import parse_search

T = TypeVar("T")

LEAST_ROUNDS = 5
TRIALS_SIMULATED, TRIALS_LIVE = 150, 40
LOADS_SIMULATED, LOADS_LIVE = "1..64", "4..64"

_OVERVIEW = """\
Find the settings and the load with which a model serves most, within bounds that you set. A language model is searched
in the simulator, whose costs of steps are calibrated on a server here; the best points are measured on servers, the
costs are scaled to them, and both is done once more. A model of a repository is searched on servers alone. What is
found is compared with the default settings in turns, and is recommended only where it is better beyond noise.
"""
_EPILOG = """\
examples:
  sluice tune                                             # the bundled model, for most tokens/s
  sluice tune /models/qwen3-8b --concurrency 1..128 --constraint 'p99_ttft<=500' --constraint 'p99_itl<=50'
  sluice tune /models/qwen3-8b --request-rate 1..32 --slo ttft=500,itl=50 --prompt-tokens 200..2000
  sluice tune /models/qwen3-8b --search max-num-seqs=32..512 --search quantization=none,int8 -- --kv-cache-memory 8G
  sluice tune --model-repository /models classifier --concurrency 100 --constraint 'p99_e2e<=100'
  sluice tune --model-repository /models pipeline --search bert.instance_count=1,2 --search words.instance_count=1..4

settings:
  of MODEL        flags of `sluice serve` without their dashes: max-num-seqs and max-num-batched-tokens by themselves,
                  others with --search: num-threads, quantization, speculation, num-speculative-tokens, kv-cache-dtype,
                  kv-cache-memory, scheduler-policy, replicas, router, ... Those that change what a step costs are
                  calibrated for each value
  of a repository instance_count, max_batch_size, max_queue_delay_microseconds (off: no batcher), preferred_batch_size
                  (none, or sizes as 8+16+32) and kind of its config.pbtxt. An ensemble's models are searched together
figures:
  {p50,p90,p95,p99,mean,max}_{ttft,itl,tpot,e2e} in ms (or 0.5s), tokens_per_s, requests_per_s, goodput (needs --slo),
  memory of all processes (4G) and gpu_memory. `sluice load --help` defines them; the simulator has no memory
output:
  --out has every trial as JSON, report.html with the picture of throughput against latency, result.json, and what to
  use: serve.sh with values.yaml for the Helm chart, or a repository with its config.pbtxt. The same command goes on
  with a folder that has trials

Exit codes: 0 with a recommendation, 1 where nothing meets the constraints, 2 for a bad option, 130 interrupted.
"""


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser for argparse, which shows the text of its own error class alone."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except TuneError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise TuneError(f"{text!r}: no such folder")
    return Path(text)


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise TuneError(f"{text!r}: no such file")
    return Path(text)


def parser() -> OneLineParser:
    """Return the parser."""
    options = OneLineParser(
        prog="sluice tune",
        usage="sluice tune [OPTIONS] [MODEL] [-- OPTIONS OF SLUICE SERVE]",
        description=_OVERVIEW,
        epilog=_EPILOG,
    )
    _add_model(options)
    _add_search(options.add_argument_group("search"))
    _add_goal(options.add_argument_group("goal"))
    _add_requests(options.add_argument_group("requests", "as `sluice load` sends them"))
    _add_measuring(options.add_argument_group("measuring"))
    return options


def _add_model(options: OneLineParser) -> None:
    options.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="MODEL of `sluice serve`, or the name of a model of --model-repository. Default: the bundled model. What "
        "follows -- goes to each server as it is",
    )
    options.add_argument(
        "--model-repository", type=_argument(_folder), metavar="FOLDER", help="tune a model of this repository"
    )
    options.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of trials and results; default: tune-MODEL, in this one"
    )
    options.add_argument("--quiet", action="store_true", help="show no progress")


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        metavar="VALUES",
        help=f"requests at a time: 16, or 1,4,16, or 1..64, which doubles ({LOADS_SIMULATED}; of a repository "
        f"{LOADS_LIVE})",
    )
    group.add_argument("--request-rate", metavar="VALUES", help="requests a second instead, whatever the server does")
    group.add_argument(
        "--search",
        type=_argument(parse_search),
        action="append",
        default=[],
        metavar="SETTING=VALUES",
        help="values of a setting, which the default is added to; repeatable",
    )
    group.add_argument(
        "--trials",
        type=at_least(1),
        metavar="N",
        help=f"points to try: {TRIALS_SIMULATED} in each search in the simulator, {TRIALS_LIVE} on servers",
    )
    group.add_argument("--live", action="store_true", help="search a language model on servers too, not simulated")
    group.add_argument(
        "--costs",
        type=_argument(_file),
        metavar="FILE",
        help="costs of steps, as `sluice load --calibrate` writes them, instead of calibrating the default settings",
    )
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of the search and of requests (0)"
    )


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        type=_argument(Objective.parse),
        metavar="FIGURE",
        help="figure to make best: rates large, others small. Default: goodput with --slo, else tokens_per_s, or "
        "requests_per_s for a repository",
    )
    group.add_argument(
        "--constraint",
        type=_argument(FigureConstraint.parse),
        action="append",
        default=[],
        metavar="FIGURE<=NUMBER",
        help="bound (<= or >=) that a point must keep to, such as 'p99_ttft<=500' or 'memory<=4G'; repeatable",
    )
    group.add_argument(
        "--slo",
        type=argument(Slo.parse),
        metavar="ttft=MS,itl=MS,...",
        help="targets of goodput for each request: ttft, itl, tpot, e2e",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api",
        type=ApiKind,
        choices=list(ApiKind),
        help="API to call; default: completions, and infer_binary for a repository",
    )
    add_prompts(group)
    group.set_defaults(prompt_tokens=TokenRange(128, 128))
    group.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="N", help="first dimension of a request's tensors (1)"
    )
    group.add_argument(
        "--timeout", type=argument(positive), default=300.0, metavar="S", help="most seconds of a request (300)"
    )


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--duration", type=argument(positive), default=10.0, metavar="S", help="seconds of a run on a server (10)"
    )
    group.add_argument(
        "--checks",
        type=at_least(1),
        default=4,
        metavar="N",
        help="best points of each search in the simulator to measure on servers (4)",
    )
    group.add_argument(
        "--rounds",
        type=at_least(LEAST_ROUNDS),
        default=LEAST_ROUNDS,
        metavar="N",
        help=f"rounds of the comparison with the default settings ({LEAST_ROUNDS}, the least that tells luck apart)",
    )
