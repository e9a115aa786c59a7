"""The command line of `sluice load`: the options, their help and the parsers of their values."""

import argparse
from functools import partial
from pathlib import Path

from sluice.load.answers import BUILTIN_SCHEMA, BUILTIN_TOOLS
from sluice.load.config import ApiKind, Arrival, SecondsRange, Slo, TokenRange, TurnRange
from sluice.load.traces import FORMATS
from sluice.load.values import (
    argument,
    at_least,
    count,
    header,
    image_size,
    json_file,
    json_object,
    levels,
    new_file,
    positive,
    shape,
    share,
    tool_functions,
    whole_levels,
)
from sluice.load.watch.watcher import AUTO

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
  sluice load --api chat --turns 2..6 --think-time 1..5 --concurrency 16 --num-requests 50     # conversations
  sluice load --api chat --json-schema builtin --output-tokens 200         # each answer is validated
  sluice load --api rag --collection docs --prompt-tokens 12               # retrieval and first token apart
  sluice load --concurrency 512 --processes 4 --duration 60
  sluice load sweep --concurrency 1,2,4,8,16 --html sweep.html             # latency against load, and the Pareto front
  sluice load --url https://api.example.com --api-key KEY --api chat --model m --allow-eos
  sluice load --calibrate costs.json                     # costs of a step, for `sluice simulate`
  sluice load compare before.json after.json             # what differs beyond noise, of two --json reports
  sluice load ab --url-a http://a:8000 --url-b http://b:8000   # two servers in turns, and what differs
  sluice load perf-analyzer -m classifier -c 16 -d 60 -f results.csv   # flags and columns of perf_analyzer

measurements:
  TTFT         time from the intended send to the first event with text
  ITL          gaps between successive token events of a request. An event with several tokens makes one gap;
               TPOT and "tokens to an event" show the difference
  TPOT         (E2E - TTFT) / (tokens - 1)
  E2E          time from the intended send to the end of the stream
  client wait  time from the intended send until this client began to send: part of TTFT and E2E, and no fault of
               the server
  goodput      requests per second that met every target of --slo
  retrieval    time from the intended send to the passages that were found (--api rag)
  queue, prefill, decode   mean times in the server, by its own metrics
  energy       of this machine's GPUs (NVML) and processors (RAPL) during the run, this client's share included

Answers that are not streamed (generate, embeddings, rerank, infer) have an E2E and no TTFT. Requests that this client
breaks off (--cancel-share) count neither as served nor as failed. A stream counts as failed where it has fewer tokens
than requested, lacks its terminator, carries an error event, times out or breaks off, and where its answer does not
meet the JSON schema or calls a tool with wrong arguments.
Exit status: 0 all served, 1 some failed, 2 the run could not begin, 130 interrupted.
"""


def parser(
    prog: str = "sluice load",
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
    is_alone: bool = True,
    is_sweep: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of `sluice load`.

    One that is not alone has no options of one server and its one report. That of a sweep takes several concurrencies
    or request rates.
    """
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
    pace = options.add_argument_group("pace", "a closed loop by default; --request-rate makes it an open loop")
    (_add_levels if is_sweep else _add_level)(pace)
    _add_pace(pace)
    add_requests(options.add_argument_group("requests"))
    add_content(options.add_argument_group("conversations, tools, structured output, images"))
    reported = options.add_argument_group("report")
    _add_report(reported)
    options.set_defaults(metrics_url="none")
    if is_alone:
        _add_reports(reported)
        if not is_sweep:
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
        type=argument(header),
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header to send; repeatable",
    )
    group.add_argument(
        "--timeout",
        type=argument(positive),
        default=300.0,
        metavar="S",
        help="most seconds of one request (%(default)g)",
    )


def _add_level(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=at_least(1),
        metavar="N",
        help="requests at a time (1); with --request-rate, the most in flight: waiting for a place is client wait",
    )
    group.add_argument(
        "--request-rate", type=argument(positive), metavar="R", help="send R requests per second (open loop)"
    )


def _add_levels(group: argparse._ArgumentGroup) -> None:
    level = group.add_mutually_exclusive_group(required=True)
    level.add_argument(
        "--concurrency", type=argument(whole_levels), metavar="N,N,...", help="requests at a time, one run for each"
    )
    level.add_argument(
        "--request-rate", type=argument(levels), metavar="R,R,...", help="requests per second, one run for each"
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    at_least_one = at_least(1)
    group.add_argument(
        "--arrival",
        type=Arrival,
        choices=list(Arrival),
        default=Arrival.POISSON,
        help="distribution of the gaps between requests (%(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=argument(positive),
        default=1.0,
        metavar="K",
        help="shape of gamma gaps: 1 is poisson, less comes in bursts, more is steadier (%(default)g)",
    )
    group.add_argument(
        "--final-rate",
        type=argument(positive),
        metavar="R",
        help="let the rate rise or fall evenly from --request-rate to R over --duration",
    )
    group.add_argument(
        "--replay-speed",
        type=argument(positive),
        metavar="X",
        help="with --trace, and neither --concurrency nor --request-rate: send it X times as fast as recorded (1)",
    )
    group.add_argument(
        "--num-requests",
        type=at_least_one,
        metavar="N",
        help="requests to send (32, or no limit with --duration); with --turns, sessions",
    )
    group.add_argument("--duration", type=argument(positive), metavar="S", help="start no request after S seconds")
    group.add_argument(
        "--warmup",
        type=argument(partial(count, least=0)),
        default=0,
        metavar="N",
        help="requests to complete before the run (0)",
    )
    group.add_argument(
        "--processes",
        type=at_least_one,
        default=1,
        metavar="N",
        help="processes of this client, where one does not suffice (%(default)s); each has a share of the requests, of "
        "the arrivals and of the requests in flight",
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


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--metrics-url",
        default=AUTO,
        metavar="URL|auto|none",
        help="page of the server's metrics, for its queue and batch over time and where its time went; auto: where the "
        "server says that it is, else its /metrics (%(default)s)",
    )
    group.add_argument(
        "--json", type=argument(new_file), metavar="FILE", help="write the report with every request as JSON"
    )
    group.add_argument(
        "--html", type=argument(new_file), metavar="FILE", help="write the report with plots as one HTML file"
    )


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--csv", type=argument(new_file), metavar="FILE", help="write a row for each request")
    group.add_argument(
        "--calibrate",
        type=argument(new_file),
        metavar="FILE",
        help="measure what the server's steps cost instead, with runs of its own (some minutes on an idle server), and "
        "write it for `sluice simulate --costs`; --prompt-tokens and --concurrency set the largest (512, 16)",
    )


def add_prompts(group: argparse._ArgumentGroup) -> None:
    """Add the options of what prompts and answers are like."""
    lengths = argument(TokenRange.parse)
    group.add_argument("--prompt-tokens", type=lengths, metavar="N|A..B", help="length of prompts (128)")
    group.add_argument(
        "--output-tokens",
        type=lengths,
        default=TokenRange(128, 128),
        metavar="N|A..B",
        help="length of answers (%(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=at_least(2),
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
        "--prefix-tokens",
        type=at_least(0),
        default=0,
        metavar="N",
        help="let prompts share their first N tokens, which count in --prompt-tokens (0)",
    )
    group.add_argument(
        "--num-prefixes", type=at_least(1), default=1, metavar="K", help="different shared starts (%(default)s)"
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
        type=argument(json_object),
        default={},
        metavar="JSON",
        help="fields to add to every request; they replace the generator's own",
    )


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options of what is in a run's requests."""
    add_prompts(group)
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of prompts, lengths and arrivals (0)"
    )
    group.add_argument(
        "--allow-eos",
        action="store_true",
        help="let the model stop by itself (no ignore_eos); output lengths are upper bounds",
    )
    group.add_argument(
        "--cancel-share",
        type=argument(share),
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


def add_content(group: argparse._ArgumentGroup) -> None:
    """Add the options of what requests have besides a prompt."""
    group.add_argument(
        "--turns",
        type=argument(TurnRange.parse),
        default=TurnRange(1, 1),
        metavar="N|A..B",
        help="send sessions of so many turns; each later turn carries those before it and the server's answers, and "
        "--concurrency and --request-rate count sessions (%(default)s)",
    )
    group.add_argument(
        "--think-time",
        type=argument(SecondsRange.parse),
        default=SecondsRange(0.0, 0.0),
        metavar="S|A..B",
        help="seconds from the end of an answer to the next turn (0)",
    )
    group.add_argument(
        "--resend-history",
        action="store_true",
        help="for responses: send the conversation with each turn, rather than name the response before it",
    )
    group.add_argument(
        "--tools",
        type=argument(partial(tool_functions, builtin=BUILTIN_TOOLS)),
        metavar="FILE|builtin",
        help="offer the tools of a JSON file; calls are counted and their arguments validated (implies --allow-eos)",
    )
    group.add_argument("--tool-choice", default="auto", metavar="auto|required|none|NAME", help="with --tools (auto)")
    group.add_argument(
        "--json-schema",
        type=argument(partial(json_file, builtin=BUILTIN_SCHEMA)),
        metavar="FILE|builtin",
        help="ask for answers that meet a JSON schema, and validate them (implies --allow-eos)",
    )
    group.add_argument(
        "--images", type=at_least(0), default=0, metavar="N", help="random PNG images in each turn (%(default)s)"
    )
    group.add_argument(
        "--image-size",
        type=argument(image_size),
        default=(512, 512),
        metavar="WxH",
        help="its pixels (512x512)",
    )
    group.add_argument(
        "--collection", default="sluice", metavar="NAME", help="documents that --api rag asks about (%(default)s)"
    )
