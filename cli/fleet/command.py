"""`sluice fleet`: its command line."""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sluice.cli.errors import CommandError, reports_errors
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import GROUPS, list_options, read_config
from sluice.gateway.options.option import (
    FAILED,
    OneLineParser,
    OptionError,
    argument_type,
    integer,
    number,
    printable_text,
    seconds,
)

if TYPE_CHECKING:
    from sluice.cli.fleet.controller import FleetReport

AUTO, LOCAL = "auto", "local"
ENGINE_GROUPS = ("model", "scheduling", "cache", "speculation", "tensorrt_llm", "shutdown", "logging")
"""Groups of the options of `sluice serve` that each engine gets."""
ENGINE_FLAGS = ("--curve-key", "--allowed-clients")
"""Options of `sluice engine` alone that are passed on, with files of the nodes."""
_USAGE = "sluice fleet up [MODEL] | status | scale --replicas N | down  [OPTIONS]"
_OVERVIEW = """\
Run several engines of one model on the nodes of a Ray cluster, and keep a file of those that are ready, which gateways
follow: sluice serve MODEL --engines engines.yaml. Ray places engines and restarts them; tokens never pass through it.
"""
_EPILOG = """\
Ray is an extra, on this machine and on each node: pip install 'sluice[ray]'

examples:
  sluice fleet up /models/Qwen3-8B --replicas 4 --gpus-per-replica 1 --curve-key KEY --allowed-clients FOLDER
  sluice fleet up --ray local --replicas 2 --insecure          two engines of the bundled model on this machine
  sluice fleet up MODEL --scale-from http://gateway:8002/metrics --min-replicas 2 --max-replicas 8
  sluice fleet scale --replicas 2                              the others end the requests that they have, and go
  sluice fleet down

The engines' options are those of sluice serve. Paths (MODEL, keys) are those of the nodes. Exit codes: 0, 1 where the
cluster or the fleet cannot be reached or is not complete, 2 for a bad option.
"""


@reports_errors("sluice fleet")
def command(argv: list[str]) -> int:
    """Run engines on the nodes of a Ray cluster, for gateways that follow the list of them."""
    arguments = _parse(argv)
    engine = engine_command(arguments)
    if find_spec("ray") is None:
        raise CommandError("Ray is not installed: pip install 'sluice[ray]'")
    from sluice.cli.fleet import session

    session.connect(arguments.ray, starts=arguments.action == "up")
    match arguments.action:
        case "up":
            report = session.up(_spec_fields(arguments, engine))
            sys.stdout.write(f"{arguments.name} follows in {report.members_file}; sluice fleet status shows it\n")
        case "status":
            report = session.report(arguments.name)
            print_report(report, Console(soft_wrap=True))
            return 0 if is_complete(report) else FAILED
        case "scale":
            session.scale(arguments.name, arguments.replicas)
        case _:
            session.down(arguments.name, arguments.timeout)
    return 0


def engine_command(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments of an engine's command, behind the Python of its node. Raises OptionError for an option of
    the engine that is not allowed."""
    flags = {name: value for name, value in vars(arguments).items() if value is not None}
    config = read_config({name: flags[name] for name in _engine_options() if name in flags}, {})
    words = ["-m", "sluice.cli", "engine", *([config.model.path] if config.model.path else [])]
    for name in (*_engine_options(), *ENGINE_FLAGS):
        value = flags.get(name)
        if not name.startswith("-") or value is None:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--no-{name[2:]}"] if each is False else [name] if each is True else [f"{name}={each}"]
    if arguments.insecure:
        words.append("--insecure")
    elif bool(flags.get("--curve-key")) != bool(flags.get("--allowed-clients")):
        raise OptionError("--curve-key and --allowed-clients belong together; --insecure is without both")
    return tuple(words)


def _engine_options() -> Iterator[str]:
    for group in ENGINE_GROUPS:
        yield from (declared.flag for _, _, declared in list_options(GROUPS[group]))


def _spec_fields(arguments: argparse.Namespace, engine: tuple[str, ...]) -> dict[str, Any]:
    replicas = 1 if arguments.replicas is None else arguments.replicas
    return {
        "name": arguments.name,
        "command": engine,
        "replicas": replicas,
        "gpus_per_replica": arguments.gpus_per_replica,
        "cpus_per_replica": arguments.cpus_per_replica,
        "members_file": str(Path(arguments.engines_file).absolute()),
        "client_key": _absolute(arguments.client_key),
        "server_key": _absolute(arguments.server_key),
        "scale_from": arguments.scale_from or "",
        "min_replicas": arguments.min_replicas,
        "max_replicas": max(arguments.max_replicas or replicas, arguments.min_replicas, 1),
    }


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def is_complete(report: "FleetReport") -> bool:
    """Return whether all wanted engines are ready."""
    ready = [each for each in report.engines.values() if each is not None and each.state == "ready"]
    return len(ready) == report.replicas


def print_report(report: "FleetReport", console: Console) -> None:
    """Print a line for each engine, and one for the fleet."""
    table = Table("engine", "state", "address", "restarts", "problem", box=None, pad_edge=False)
    for name, status in report.engines.items():
        if status is None:
            table.add_row(name, "unknown", "", "", "its node does not answer")
        else:
            table.add_row(name, status.state, status.address, str(status.num_restarts), status.problem)
    console.print(table)
    pressure = "" if report.pressure is None else f", pressure {report.pressure:.2f}"
    problem = f"; {report.problem}" if report.problem else ""
    console.print(f"{report.replicas} engines wanted{pressure}; list: {report.members_file}{problem}", highlight=False)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits the process for bad arguments and after --help."""
    parser = OneLineParser(prog="sluice fleet", usage=_USAGE, description=_OVERVIEW, epilog=_EPILOG)
    parser.add_argument("action", choices=("up", "status", "scale", "down"), metavar="up|status|scale|down")
    cluster = parser.add_argument_group("Fleet")
    _add(cluster, "--ray", "ADDRESS", AUTO, _text, "address of the Ray cluster; auto is the one of this machine; local "
         "starts one on this machine, which goes on")  # fmt: skip
    _add(cluster, "--name", "NAME", "sluice-fleet", _name, "name of the fleet")
    _add(cluster, "--replicas", "N", None, argument_type(integer(0)), "engines; each has a placement group of one "
         "bundle. Default for up: 1")  # fmt: skip
    _add(cluster, "--gpus-per-replica", "K", 0.0, _amount, "GPUs of each engine, on one node")
    _add(cluster, "--cpus-per-replica", "K", 1.0, _amount, "cores of each engine that Ray counts")
    _add(cluster, "--engines-file", "FILE", "engines.yaml", _text, "the list of engines, written on this machine")
    _add(cluster, "--scale-from", "URL", None, _url, "metrics of a gateway; sluice_scale_pressure there decides how "
         "many engines there are, within the bounds")  # fmt: skip
    _add(cluster, "--min-replicas", "N", 1, argument_type(integer(0)), "fewest engines then; 0 lets the "
         "last one end, for gateways with --wake-timeout-secs")  # fmt: skip
    _add(cluster, "--max-replicas", "N", None, argument_type(integer(1)), "most engines then. Default: --replicas")
    _add(cluster, "--timeout", "SECONDS", 60.0, argument_type(seconds(0)), "down: how long engines may take to end "
         "their requests; then they are killed")  # fmt: skip
    for flag in ENGINE_FLAGS:
        cluster.add_argument(flag, metavar="PATH", dest=flag, help=f"{flag} of sluice engine")
    _add(cluster, "--client-key", "FILE", None, _text, "a gateway's secret certificate, for the list of engines")
    _add(cluster, "--server-key", "FILE", None, _text, "the engines' public certificate, for the list of engines")
    cluster.add_argument("--insecure", action="store_true", help="engines listen without keys")
    add_options(parser, (GROUPS[name] for name in ENGINE_GROUPS))
    arguments = parser.parse_args(argv)
    if arguments.action == "scale" and arguments.replicas is None:
        parser.error("scale needs --replicas")
    return arguments


def _add(group: Any, flag: str, metavar: str, default: Any, parse: Any, text: str) -> None:
    shown = "" if default is None else f". Default: {default}"
    group.add_argument(flag, metavar=metavar, default=default, type=parse, help=f"{text}{shown}")


_text = argument_type(printable_text("printable text"))
_amount = argument_type(number(0))


@argument_type
def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", text, re.ASCII):
        raise ValueError("letters, digits, '.', '_' and '-' alone, the first one a letter or a digit")
    return text


@argument_type
def _url(text: str) -> str:
    if not re.fullmatch(r"https?://\S+", text):
        raise ValueError("an address http://…")
    return text
