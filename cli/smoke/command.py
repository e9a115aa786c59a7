"""The command `sluice smoke`: runs the checks one after the other and prints a line for each."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.markup import escape

from sluice.cli.errors import reports_errors
from sluice.gateway.options.config import list_options, read_group
from sluice.gateway.options.option import FAILED, OneLineParser, OptionError, argument_type, integer
from sluice.gateway.options.rag import RagClientOptions

if TYPE_CHECKING:
    from sluice.cli.smoke.deployment import Deployment, SmokeTarget

_OVERVIEW = """\
Prove in a minute that a running deployment serves: health, keys, every protocol whole and streamed, cancellation, bad
input, retrieval, metrics. Nothing stays behind: the collection that it makes is deleted again.
"""
_EPILOG = """\
examples:
  sluice smoke                                           the server on this machine
  SLUICE_API_KEY=sk-... sluice smoke https://llm.example.com --grpc llm.example.com:443 --metrics none
  sluice smoke --json | jq -r '.checks[] | select(.outcome == "failed") | .name'

A check is skipped, with the reason, where the deployment has nothing for it: no encoder, no collections, no keys.

Exit codes: 0 when no check failed, 1 when one did, 2 for a bad option.
"""
_NONE = "none"
_NAME_CHARS = 24
_MODELS = "models"
"""The check that chooses the models which others ask."""


Check = Callable[["Deployment"], Awaitable[str]]


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


_STYLES = {CheckOutcome.OK: "green", CheckOutcome.SKIPPED: "yellow", CheckOutcome.FAILED: "bold red"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: what it saw, in words, and how long it took."""

    name: str
    outcome: CheckOutcome
    text: str
    seconds: float


@reports_errors("sluice smoke")
def command(argv: list[str]) -> int:
    """Prove in a minute that a running deployment serves each protocol."""
    arguments = _parse_arguments(argv)
    target = _read_target(arguments)
    console = Console(quiet=arguments.json, highlight=False, soft_wrap=True)
    results = asyncio.run(_examine(target, arguments.only, console))
    is_failed = any(result.outcome is CheckOutcome.FAILED for result in results)
    if arguments.json:
        body = {"verdict": "failed" if is_failed else "ok", "checks": [asdict(result) for result in results]}
        sys.stdout.write(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() + "\n")
    console.print(_verdict(results))
    return FAILED if is_failed else 0


async def _examine(target: "SmokeTarget", only: str, console: Console) -> list[CheckResult]:
    """Run the checks, or those whose names contain `only` and the one that they all need."""
    # Imported late: bad options should be reported fast.
    from sluice.cli.smoke.deployment import Deployment

    results = []
    grpc, metrics = ("as it says" if each is None else each or _NONE for each in (target.grpc, target.metrics_url))
    console.print(f"{target.url}, gRPC {grpc}, metrics {metrics}")
    async with Deployment(target) as deployment:
        for name, check in _list_checks():
            if only not in name and name != _MODELS:
                continue
            result = await _run(name, check, deployment)
            style = _STYLES[result.outcome]
            console.print(
                f"[{style}]{result.outcome:<8}[/]{name:<{_NAME_CHARS}}{result.seconds:6.2f} s  {escape(result.text)}"
            )
            results.append(result)
    return results


async def _run(name: str, check: Check, deployment: "Deployment") -> CheckResult:
    from sluice.cli.smoke.deployment import SmokeFailedError, SmokeSkippedError

    began = monotonic()
    try:
        async with asyncio.timeout(deployment.target.timeout_s):
            outcome, text = CheckOutcome.OK, await check(deployment)
    except SmokeSkippedError as error:
        outcome, text = CheckOutcome.SKIPPED, str(error)
    except SmokeFailedError as error:
        outcome, text = CheckOutcome.FAILED, str(error)
    except TimeoutError:
        outcome, text = CheckOutcome.FAILED, f"not done within {deployment.target.timeout_s:g} s (--timeout)"
    except (KeyError, TypeError, ValueError, IndexError) as error:
        # The answer parsed, and is not of the form that its protocol prescribes.
        outcome, text = CheckOutcome.FAILED, f"an answer has not its protocol's form: {type(error).__name__} {error}"
    return CheckResult(name, outcome, text, monotonic() - began)


def _list_checks() -> list[tuple[str, Check]]:
    """Return all checks with their names, in the order in which they run."""
    from sluice.cli.smoke import grpc_checks, service_checks, text_checks

    metrics = service_checks.MetricsCheck()
    return [
        ("health", service_checks.check_health),
        ("health over gRPC", grpc_checks.check_grpc_health),
        ("keys", service_checks.check_keys),
        (_MODELS, service_checks.check_models),
        ("metrics can be read", metrics.begin),
        ("chat completions", text_checks.check_chat),
        ("completions", text_checks.check_completions),
        ("responses", text_checks.check_responses),
        ("Anthropic messages", text_checks.check_messages),
        ("Ollama chat", text_checks.check_ollama),
        ("v2 generate", text_checks.check_generate),
        ("v2 gRPC stream", grpc_checks.check_grpc_stream),
        ("v2 infer", grpc_checks.check_infer),
        ("retrieval", text_checks.check_rag),
        ("bad input", service_checks.check_bad_input),
        ("a client that leaves", service_checks.check_cancel),
        ("metrics have moved", metrics.end),
    ]


def _verdict(results: list[CheckResult]) -> str:
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in CheckOutcome}
    seconds = sum(result.seconds for result in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f" in {seconds:.1f} s"


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="sluice smoke", usage="sluice smoke [OPTIONS] [URL]", description=_OVERVIEW, epilog=_EPILOG
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="the server's address. Default: http://127.0.0.1:8000")
    declared = {each.flag: each for _, _, each in list_options(RagClientOptions)}["--api-key"]
    parser.add_argument(declared.flag, metavar=declared.metavar, help=declared.help)
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help="where gRPC is served, or none; by TLS where URL is https. Default: at the URL's host, as the server says",
    )
    parser.add_argument(
        "--metrics",
        metavar="URL",
        help="the page of metrics, or none. Default: at the URL's host, at the port that the server says",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="the language model to ask. Default: the first")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the checks whose names contain TEXT, as in --only stream"
    )
    parser.add_argument(
        "--timeout",
        type=argument_type(integer(1)),
        default=60,
        metavar="SECONDS",
        help="how long one check may take. Default: 60",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args(argv)


def _read_target(arguments: argparse.Namespace) -> "SmokeTarget":
    """Read the addresses. Raises OptionError."""
    given = {"--url": arguments.url, "--api-key": arguments.api_key}
    client = read_group(RagClientOptions, {flag: value for flag, value in given.items() if value is not None})
    from sluice.cli.smoke.deployment import SmokeTarget

    grpc, metrics = arguments.grpc or None, arguments.metrics
    if grpc not in (None, _NONE) and ":" not in grpc:
        raise OptionError(f"--grpc: expected HOST:PORT or none, got {grpc!r}")
    if metrics not in (None, _NONE) and not metrics.startswith(("http://", "https://")):
        raise OptionError(f"--metrics: expected a URL that begins with http:// or https://, or none, got {metrics!r}")
    return SmokeTarget(
        client.url,
        "" if grpc == _NONE else grpc,
        "" if metrics == _NONE else metrics,
        client.api_key,
        arguments.model,
        float(arguments.timeout),
    )
