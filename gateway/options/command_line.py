"""The command line of `sluice serve`: which flags there are, and what one says. Their meaning is config.py's."""

import argparse
from collections.abc import Iterator
from typing import Any

from gateway.options.accepted_flags import ACCEPTED
from gateway.options.arguments import OneLineParser
from gateway.options.config import GROUPS, options_of
from gateway.options.option import Option

Flags = dict[str, str | bool | list[str]]
"""By flag: its text, its texts where it may come several times, a truth for a switch."""

_DESCRIPTION = "Serve models: OpenAI API and Triton v2 over HTTP, Triton v2 over gRPC, Prometheus metrics."
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


def parse_flags(argv: list[str]) -> Flags:
    """What the command line gives. Exits where it cannot be understood."""
    switches, rest = _valued_switches(argv)
    parsed = vars(_parser().parse_args(rest))
    return {**{flag: value for flag, value in parsed.items() if value is not None}, **switches}


def _valued_switches(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Switches that are given a value, as tritonserver's are: --strict-readiness=false or --strict-readiness false."""
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
        for _, _, declared in options_of(group):
            if declared.metavar is None and declared.flag.startswith("-"):
                yield declared.flag


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice serve",
        usage="sluice serve [MODEL] [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in GROUPS.values():
        title = (group.__doc__ or "").partition("\n")[0]
        section = parser.add_argument_group(title)
        for _, default, declared in options_of(group):
            _add(section, declared, default)
    for accepted in ACCEPTED:
        parser.add_argument(accepted.flag, nargs="?", const="true", dest=accepted.flag, help=argparse.SUPPRESS)
    return parser


def _add(section: argparse._ArgumentGroup, declared: Option, default: Any) -> None:
    """Values stay text here: config.py reads flags and variables by the same rules."""
    text = declared.help if default in (None, False, ()) else f"{declared.help}. Default: {_shown(default)}"
    text = text.replace("%", "%%")
    if not declared.flag.startswith("-"):
        section.add_argument(declared.flag, nargs="?", default=None, help=text)
    elif declared.metavar is None:
        switch = argparse.BooleanOptionalAction if default else "store_true"
        section.add_argument(declared.flag, action=switch, default=None, dest=declared.flag, help=text)
    else:
        names = (declared.flag, *declared.aliases)
        action = "append" if declared.is_many else "store"
        section.add_argument(
            *names, metavar=declared.metavar, action=action, default=None, dest=declared.flag, help=text
        )


def _shown(default: Any) -> str:
    """A default as an operator would type it."""
    if isinstance(default, bool):
        return "on"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        return f"{default >> 20}M"
    return str(default)
