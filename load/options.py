"""The command line of `sluice load`: the options, their help and the parsers of their values."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from load.config import ApiKind, Arrival, LoadConfigError, Slo, TokenRange
from load.traces import FORMATS

T = TypeVar("T")

DESCRIPTION = """\
Measure a server of models: time to first token, gaps between tokens, throughput, failures.
The server may speak OpenAI's, Anthropic's or Ollama's API, or Triton's v2 protocol over HTTP or gRPC.
"""

EPILOG = """\
examples:
  sluice load                                            # the local server, one request at a time
  sluice load --concurrency 32 --num-requests 256 --prompt-tokens 32..256 --output-tokens 64..192
  sluice load --request-rate 8 --duration 60 --slo ttft=200,itl=50     # open loop with targets
  sluice load --api chat --tokenizer models/rill/1/tokenizer.json --prompt-tokens 100
  sluice load --api generate_stream --model rill --json out.json
  sluice load --api infer_binary --model classifier --shape input_ids:1,128 --concurrency 16
  sluice load --url http://127.0.0.1:8001 --api grpc_stream --model rill      # the server's gRPC port
  sluice load --request-rate 2 --final-rate 40 --duration 120 --arrival gamma --burstiness 0.3   # a rising, bursty load
  sluice load --trace mooncake_trace.jsonl --replay-speed 10
  sluice load --prompt-tokens 600 --prefix-tokens 500 --num-prefixes 8 --cancel-share 0.1
  sluice load --url https://api.example.com --api-key KEY --api chat --model m --allow-eos
  sluice load --calibrate costs.json                     # costs of a step, for `sluice simulate`
  sluice load compare before.json after.json             # what differs beyond noise, of two --json reports
  sluice load ab --url-a http://a:8000 --url-b http://b:8000   # two servers in turns, and what differs

measurements:
  TTFT         time from the intended send to the first event with text
  ITL          gaps between successive token events of a request. An event with several tokens makes one gap;
               TPOT and "tokens to an event" show the difference
  TPOT         (E2E - TTFT) / (tokens - 1)
  E2E          time from the intended send to the end of the stream
  client wait  time from the intended send until this client began to send: part of TTFT and E2E, and no fault of
               the server
  goodput      requests per second that met every target of --slo

Answers that are not streamed (generate, embeddings, rerank, infer) have an E2E and no TTFT. Requests that this client
breaks off (--cancel-share) count neither as served nor as failed. A stream counts as failed where it has fewer tokens
than requested, lacks its terminator, carries an error event, times out or breaks off.
Exit status: 0 all served, 1 some failed, 2 the run could not begin, 130 interrupted.
"""


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser for argparse, which shows the text of its own error class alone."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except LoadConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise LoadConfigError(f"{text!r}: write a number above 0")
    return value


def _count(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise LoadConfigError(f"{text!r}: write a whole number, at least {least}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise LoadConfigError(f"{text!r}: write a number from 0 to 1")
    return value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse the shape of an input: `input_ids:1,128`."""
    name, colon, sizes = text.rpartition(":")
    if not colon or not name or not all(size.isdecimal() and int(size) > 0 for size in sizes.split(",")):
        raise LoadConfigError(f"{text!r}: write a shape as NAME:D,D,..., e.g. input_ids:1,128")
    return name, tuple(int(size) for size in sizes.split(","))


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise LoadConfigError(f"{text!r}: write a header as 'Name: value'")
    return name.strip(), value.strip()


def new_file(text: str) -> Path:
    """Parse a file to write. Its folder is checked now rather than after a long run."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise LoadConfigError(f"{text!r}: write a file in a folder that exists")
    return Path(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadConfigError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadConfigError("write a JSON object, e.g. '{\"top_p\": 0.9}'")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """Return the parser of a whole number, for argparse."""
    return argument(partial(_count, least=least))


def parser(
    prog: str = "sluice load",
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
    is_alone: bool = True,
) -> argparse.ArgumentParser:
    """Return the parser of `sluice load`. One that is not alone has no options of one server and its one report."""
    options = argparse.ArgumentParser(
        prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = options.add_argument_group("server")
    if is_alone:
        server.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens (%(default)s)")
    _add_server(server)
    _add_pace(options.add_argument_group("pace", "a closed loop by default; --request-rate makes it an open loop"))
    _add_workload(options.add_argument_group("requests"))
    reported = options.add_argument_group("report")
    _add_report(reported)
    if is_alone:
        _add_files(reported)
    return options


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api", type=ApiKind, choices=list(ApiKind), default=ApiKind.COMPLETIONS, help="API to call (%(default)s)"
    )
    group.add_argument("--model", help="model to ask for; default: the first of the server's /v1/models")
    group.add_argument("--api-key", metavar="KEY", help="key to send as 'Authorization: Bearer KEY'")
    group.add_argument(
        "--header",
        type=argument(_header),
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header to send; repeatable",
    )
    group.add_argument(
        "--timeout",
        type=argument(_positive),
        default=300.0,
        metavar="S",
        help="most seconds of one request (%(default)g)",
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    at_least_one = argument(partial(_count, least=1))
    group.add_argument(
        "--concurrency",
        type=at_least_one,
        metavar="N",
        help="requests at a time (1); with --request-rate, the most in flight: waiting for a place is client wait",
    )
    group.add_argument(
        "--request-rate", type=argument(_positive), metavar="R", help="send R requests per second (open loop)"
    )
    group.add_argument(
        "--arrival",
        type=Arrival,
        choices=list(Arrival),
        default=Arrival.POISSON,
        help="distribution of the gaps between requests (%(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=argument(_positive),
        default=1.0,
        metavar="K",
        help="shape of gamma gaps: 1 is poisson, less comes in bursts, more is steadier (%(default)g)",
    )
    group.add_argument(
        "--final-rate",
        type=argument(_positive),
        metavar="R",
        help="let the rate rise or fall evenly from --request-rate to R over --duration",
    )
    group.add_argument(
        "--replay-speed",
        type=argument(_positive),
        metavar="X",
        help="with --trace, and neither --concurrency nor --request-rate: send it X times as fast as recorded (1)",
    )
    group.add_argument(
        "--num-requests", type=at_least_one, metavar="N", help="requests to send (32, or no limit with --duration)"
    )
    group.add_argument("--duration", type=argument(_positive), metavar="S", help="start no request after S seconds")
    group.add_argument(
        "--warmup",
        type=argument(partial(_count, least=0)),
        default=0,
        metavar="N",
        help="requests to complete before the run (0)",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    lengths = argument(TokenRange.parse)
    group.add_argument(
        "--prompt-tokens",
        type=lengths,
        metavar="N|A..B",
        help="length of prompts (128)",
    )
    group.add_argument(
        "--output-tokens",
        type=lengths,
        default=TokenRange(128, 128),
        metavar="N|A..B",
        help="length of answers (%(default)s)",
    )
    group.add_argument(
        "--seed",
        type=argument(partial(_count, least=0)),
        default=0,
        metavar="N",
        help="seed of prompts, lengths and arrivals (0)",
    )
    group.add_argument(
        "--vocab-size",
        type=argument(partial(_count, least=2)),
        default=4096,
        metavar="N",
        help="draw the token ids of completions prompts below N (%(default)s); their length is exact",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the model's tokenizer.json, for text prompts of exact length (needs the tokenizers package)",
    )
    group.add_argument(
        "--allow-eos",
        action="store_true",
        help="let the model stop by itself (no ignore_eos); output lengths are upper bounds",
    )
    group.add_argument(
        "--prefix-tokens",
        type=argument(partial(_count, least=0)),
        default=0,
        metavar="N",
        help="let prompts share their first N tokens, which count in --prompt-tokens (0)",
    )
    group.add_argument(
        "--num-prefixes", type=at_least(1), default=1, metavar="K", help="different shared starts (%(default)s)"
    )
    group.add_argument(
        "--cancel-share",
        type=argument(_share),
        default=0.0,
        metavar="P",
        help="let a part P of the clients (0 to 1) leave at a random token of the answer (0)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send the requests of a trace: " + ", ".join(FORMATS) + "; the content tells which",
    )
    group.add_argument(
        "--shape",
        type=argument(shape),
        action="append",
        default=[],
        metavar="NAME:D,D,...",
        help="shape of an input of a v2 model, where dimensions vary; repeatable",
    )
    group.add_argument(
        "--extra-body",
        type=argument(_json_object),
        default={},
        metavar="JSON",
        help="fields to add to every request; they replace the generator's own",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        type=argument(Slo.parse),
        metavar="ttft=MS,itl=MS,...",
        help="targets of goodput: ttft, itl (99th percentile of a request's gaps), tpot, e2e",
    )
    group.add_argument("--allow-failures", action="store_true", help="exit 0 even where requests failed")
    group.add_argument("--quiet", action="store_true", help="show no progress")


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", type=argument(new_file), metavar="FILE", help="write the report with every request as JSON"
    )
    group.add_argument(
        "--html", type=argument(new_file), metavar="FILE", help="write the report with plots as one HTML file"
    )
    group.add_argument("--csv", type=argument(new_file), metavar="FILE", help="write a row for each request")
    group.add_argument(
        "--calibrate",
        type=argument(new_file),
        metavar="FILE",
        help="measure what the server's steps cost instead, with runs of its own (some minutes on an idle server), and "
        "write it for `sluice simulate --costs`; --prompt-tokens and --concurrency set the largest (512, 16)",
    )
