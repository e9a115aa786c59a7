"""The command line of `sluice serve`: its flags, and those of tritonserver that it accepts and ignores."""

import argparse
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.gateway.options.config import GROUPS, ParsedFlags, list_options
from sluice.gateway.options.option import OneLineParser, Option, OptionError, truth
from sluice.gateway.options.telemetry import TRACE_CONFIG
from sluice.gateway.tenancy.access.identity import NO_LIMITS

_DESCRIPTION = "Serve models: OpenAI API and Triton v2 over HTTP, Triton v2 over gRPC, Prometheus metrics."
_NOTHING = (None, False, (), "", NO_LIMITS)
"""Defaults that no help names."""
_TRUTHS = ("true", "false", "True", "False", "1", "0")
_EPILOG = """\
Every option can be set in the environment too, as SLUICE_ and its name: SLUICE_HTTP_PORT=9000,
SLUICE_MODEL=/models/qwen3. What the command line says wins. Several values of one option have commas between
them in its variable, and semicolons where a value may hold commas (--cache-config, --backend-config ...).

examples:
  sluice serve                                    serve the bundled model on 127.0.0.1:8000
  sluice serve /models/Qwen3-0.6B --kv-cache-memory 2G
  sluice serve --model-repository /models         serve a Triton model repository
  SLUICE_API_KEY=... sluice serve --host 0.0.0.0  serve the network, and ask for a key
  sluice serve --max-num-seqs 16                  fewer streams at once, each of them faster

ports: 8000 HTTP, 8001 gRPC, 8002 metrics. Exit codes: 0 after a clean shutdown,
1 where the server could not start, 2 for a bad option, 128 + signal when told twice to stop.
"""


@dataclass(frozen=True, slots=True)
class AcceptedFlag:
    """A flag of tritonserver without effect here. `advice` says what applies instead.

    Where `is_refused` is not None, the flag with that truth value keeps the server from starting.
    """

    flag: str
    advice: str
    is_refused: bool | None = None


_ONE_LOOP = "connections share one event loop, and backends have threads of their own"
_NO_POOL = "tensors are not copied to a pool; each backend's library keeps its own memory"
_SAGEMAKER = "there is no SageMaker endpoint; put one in front, its /invocations is /v2/models/NAME/infer"
_VERTEX = "there is no Vertex AI endpoint; put one in front, its :predict is /v2/models/NAME/infer"
ACCEPTED_FLAGS = (
    AcceptedFlag("--allow-http", "HTTP has the health probes; --host 127.0.0.1 keeps it to this machine", False),
    AcceptedFlag("--http-thread-count", _ONE_LOOP),
    AcceptedFlag("--grpc-infer-thread-count", _ONE_LOOP),
    AcceptedFlag("--grpc-infer-allocation-pool-size", "messages are freed when they are sent"),
    AcceptedFlag("--grpc-max-response-pool-size", "a stream keeps no more than its reader is behind"),
    AcceptedFlag("--buffer-manager-thread-count", _ONE_LOOP),
    AcceptedFlag("--pinned-memory-pool-byte-size", _NO_POOL),
    AcceptedFlag("--cuda-memory-pool-byte-size", _NO_POOL),
    AcceptedFlag("--cuda-virtual-address-size", _NO_POOL),
    AcceptedFlag("--enable-peer-access", _NO_POOL),
    AcceptedFlag("--model-load-gpu-limit", "each backend's library says what fits on a GPU"),
    AcceptedFlag("--min-supported-compute-capability", "each backend's library says which GPUs it runs on"),
    AcceptedFlag("--repoagent-directory", "the one agent is checksum, and it is built in"),
    AcceptedFlag("--cache-directory", "caches are built in: --cache-config local,... or redis,..."),
    AcceptedFlag("--allow-sagemaker", _SAGEMAKER, True),
    AcceptedFlag("--sagemaker-port", _SAGEMAKER),
    AcceptedFlag("--sagemaker-safe-port-range", _SAGEMAKER),
    AcceptedFlag("--sagemaker-thread-count", _SAGEMAKER),
    AcceptedFlag("--allow-vertex-ai", _VERTEX, True),
    AcceptedFlag("--vertex-ai-port", _VERTEX),
    AcceptedFlag("--vertex-ai-thread-count", _VERTEX),
    AcceptedFlag("--vertex-ai-default-model", _VERTEX),
    AcceptedFlag("--allow-poll-model-repository", "that was replaced by --model-control-mode poll", True),
    AcceptedFlag("--allow-model-control", "that was replaced by --model-control-mode explicit", True),
    AcceptedFlag("--tf-allow-soft-placement", "SavedModels run in OpenVINO"),
    AcceptedFlag("--tf-gpu-memory-fraction", "SavedModels run in OpenVINO"),
)
_BY_FLAG = {each.flag: each for each in ACCEPTED_FLAGS}
TRACE_FLAGS = {
    "--trace-file": "file",
    "--trace-level": "level",
    "--trace-rate": "rate",
    "--trace-count": "count",
    "--trace-log-frequency": "log-frequency",
}
"""Flags of older releases that set what `--trace-config` sets, by key there."""
_STRICT_CONFIG, _NO_COMPLETION = "--strict-model-config", "--disable-auto-complete-config"
"""A switch of older releases, and the one that replaced it."""


def parse_flags(argv: list[str]) -> ParsedFlags:
    """Parse the command line. Exits where it cannot be understood."""
    parser = _parser()
    switches, rest = _valued_switches(_written_out(argv, parser))
    parsed = vars(parser.parse_args(rest))
    for flag, key in TRACE_FLAGS.items():
        values = parsed.pop(flag) or ()
        parsed[TRACE_CONFIG] = [*(parsed[TRACE_CONFIG] or ()), *(f"{key}={value}" for value in values)] or None
    return {**{flag: value for flag, value in parsed.items() if value is not None}, **switches}


def _written_out(argv: list[str], parser: OneLineParser) -> list[str]:
    """Write out flags that are shortened to where no other begins so, which getopt lets tritonserver's users do."""
    written = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and len(flag) > 2 and flag not in parser.flags:
            longer = [each for each in (*parser.flags, _STRICT_CONFIG) if each.startswith(flag)]
            flag = longer[0] if len(longer) == 1 else flag
        written.append((_NO_COMPLETION if flag == _STRICT_CONFIG else flag) + equals + value)
    return written


def _valued_switches(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate switches with a value, as tritonserver has them: --strict-readiness=false, --strict-readiness false."""
    switches = set(_switches())
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in switches and equals:
            found[flag] = value
        elif rest and rest[-1] in switches and word in _TRUTHS:
            found[rest.pop()] = word
        else:
            rest.append(word)
        if word == "--":
            rest.extend(words)
    return found, rest


def _switches() -> Iterator[str]:
    for group in GROUPS.values():
        for _, _, declared in list_options(group):
            if declared.metavar is None and declared.flag.startswith("-"):
                yield declared.flag


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="sluice serve",
        usage="sluice serve [MODEL] [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_options(parser, GROUPS.values())
    for accepted in ACCEPTED_FLAGS:
        parser.add_argument(accepted.flag, nargs="?", const="true", dest=accepted.flag, help=argparse.SUPPRESS)
    for flag in TRACE_FLAGS:
        parser.add_argument(flag, action="append", dest=flag, help=argparse.SUPPRESS)
    return parser


def add_options(
    parser: OneLineParser,
    groups: Iterable[type[Any]],
    renamed: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Add the options of `groups` to `parser`, each group under its title. `renamed` has other flags for some; their
    values keep their names. With `only`, no other flags than those are added."""
    for group in groups:
        title = (group.__doc__ or "").partition("\n")[0]
        section = parser.add_argument_group(title)
        for _, default, declared in list_options(group):
            if only is not None and declared.flag not in only:
                continue
            flag = (renamed or {}).get(declared.flag, declared.flag)
            _add_option(section, declared, default, flag)


def _add_option(section: argparse._ArgumentGroup, declared: Option, default: Any, flag: str) -> None:
    """Add an option. Its values stay text here: `read_config` reads flags and variables by the same rules."""
    shown = format_default(default)
    text = (f"{declared.help}. Default: {shown}" if shown else declared.help).replace("%", "%%")
    if not flag.startswith("-"):
        section.add_argument(flag, nargs="?", default=None, help=text)
    elif declared.metavar is None:
        switch = argparse.BooleanOptionalAction if default else "store_true"
        section.add_argument(flag, action=switch, default=None, dest=declared.flag, help=text)
    else:
        names = (flag, *declared.aliases)
        action = "append" if declared.is_many else "store"
        section.add_argument(
            *names, metavar=declared.metavar, action=action, default=None, dest=declared.flag, help=text
        )


def format_default(default: Any) -> str:
    """Return a default as an operator would type it; "" for one that is nothing."""
    if default in _NOTHING:
        return ""
    if default is True:
        return "on"
    if isinstance(default, float):
        return f"{default:.12g}"
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        return f"{default >> 20}M"
    return str(default)


def check_accepted_flags(flags: ParsedFlags) -> list[str]:
    """Return a sentence for each accepted flag in `flags`. Raises OptionError for one that is refused."""
    sentences = []
    for flag, value in flags.items():
        accepted = _BY_FLAG.get(flag)
        if accepted is None:
            continue
        if accepted.is_refused is not None and _parse_truth(flag, str(value)) is accepted.is_refused:
            raise OptionError(f"{flag} {value}: {accepted.advice}")
        sentences.append(f"{flag} has no effect: {accepted.advice}")
    return sentences


def _parse_truth(flag: str, text: str) -> bool:
    try:
        return truth(text)
    except ValueError as error:
        raise OptionError(f"{flag} must be {error}, got {text!r}") from None
