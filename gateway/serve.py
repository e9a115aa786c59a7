"""`sluice serve`: from arguments to a running server."""

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from engine.errors import SluiceError
from gateway.checkpoint import find_checkpoint
from gateway.config import GROUPS, ServeConfig, options_of, read_config, unknown_variables
from gateway.listeners import ListenError
from gateway.options import ConfigError, Option
from gateway.telemetry.logs import configure_logging

log = logging.getLogger(__name__)

FAILED = 1
USAGE_ERROR = 2

_EPILOG = """\
Every option can be set in the environment too, as SLUICE_ and its name: SLUICE_HTTP_PORT=9000,
SLUICE_MODEL=/models/qwen3. What the command line says wins.

examples:
  sluice serve                                    serve the bundled model on 127.0.0.1:8000
  sluice serve /models/Qwen3-0.6B --kv-cache-memory 2G
  sluice serve --model-repository /models         serve a Triton model repository
  SLUICE_API_KEY=... sluice serve --host 0.0.0.0  serve the network, and ask for a key
  sluice serve --max-num-seqs 16                  fewer streams at once, each of them faster

ports: 8000 HTTP, 8001 gRPC, 8002 metrics. Exit codes: 0 after a clean shutdown,
1 where the server could not start, 2 for a bad option, 128 + signal when told twice to stop.
"""


def command(argv: list[str]) -> int:
    """Serve models: OpenAI API and Triton v2 over HTTP, Triton v2 over gRPC, Prometheus metrics."""
    started = perf_counter()
    flags = parse_flags(argv)
    try:
        config = _with_draft_found(read_config(flags))
        checkpoint = _checkpoint(config)
    except ConfigError as error:
        return _fail(str(error), USAGE_ERROR)
    configure_logging(config.logging.level)
    _warn(config)
    return _serve(config, checkpoint, started)


def _checkpoint(config: ServeConfig) -> Path | None:
    """The folder of MODEL; the bundled one where nothing else is to be served."""
    if config.model.path is None and config.repository.paths:
        return None
    return find_checkpoint(config.model.path)


def _with_draft_found(config: ServeConfig) -> ServeConfig:
    """The draft model is named as the model is: a folder, a folder of versions or a name on the hub."""
    path = config.speculation.draft_model_path
    if path is None:
        return config
    found = str(find_checkpoint(path, "--draft-model"))
    return replace(config, speculation=replace(config.speculation, draft_model_path=found))


def parse_flags(argv: list[str]) -> dict[str, str | bool | list[str]]:
    """What the command line gives. Exits where it cannot be understood."""
    return {flag: value for flag, value in vars(_parser().parse_args(argv)).items() if value is not None}


def _serve(config: ServeConfig, checkpoint: Path | None, started: float) -> int:
    from gateway.lifecycle import run_server  # what it imports is wanted only once the options are right

    try:
        run_server(config, checkpoint, started)
    except ConfigError as error:
        return _fail(str(error), USAGE_ERROR)
    except (ListenError, SluiceError) as error:
        return _fail(str(error), FAILED)
    return 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"sluice serve: error: {message}\n")
    return code


def _warn(config: ServeConfig) -> None:
    for name in unknown_variables():
        log.warning("the variable %s is no option of sluice serve, and is ignored", name)


class _Parser(argparse.ArgumentParser):
    """One line for an error, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        sys.exit(USAGE_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sluice serve",
        usage="sluice serve [MODEL] [OPTIONS]",
        description=command.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in GROUPS.values():
        title = (group.__doc__ or "").partition("\n")[0]
        section = parser.add_argument_group(title)
        for _, default, declared in options_of(group):
            _add(section, declared, default)
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
