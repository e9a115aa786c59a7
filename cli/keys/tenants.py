"""The command `sluice tenants`: sets and shows the limits of tenants, in the store of the keys."""

import argparse
import asyncio
import sys

import msgspec

from sluice.cli.errors import reports_errors
from sluice.cli.keys.command import add_command, add_limits, given_limits, print_json, run_on_store
from sluice.cli.terminal import strip_control
from sluice.gateway.options.option import OneLineParser
from sluice.gateway.tenancy.access.identity import NO_LIMITS, QuotaLimits
from sluice.gateway.tenancy.access.keys import check_tenant_name, parse_limits
from sluice.gateway.tenancy.access.store import KeyStore

_PROGRAM = "sluice tenants"
_OVERVIEW = """\
Set and show what tenants may use: all their keys together. Servers that share the store of keys follow within a second.

commands:
  set     set the limits of a tenant, in the place of those before; without limits, remove them
  list    show the tenants that have limits
"""
_EPILOG = """\
examples:
  sluice tenants set research --tokens-per-day 5000000 --concurrent-requests 32
  sluice tenants set research

Exit codes: 0 when done, 1 where the store said no, 2 for a bad option.
"""


@reports_errors(_PROGRAM)
def command(argv: list[str]) -> int:
    """Set and show the limits of tenants."""
    arguments = _parser().parse_args(argv)
    return asyncio.run(run_on_store(arguments, {"set": _set, "list": _list}[arguments.command]))


async def _list(store: KeyStore, arguments: argparse.Namespace) -> int:
    for name, limits in (await store.load_tenants()).items():
        _show(name, limits, arguments)
    return 0


async def _set(store: KeyStore, arguments: argparse.Namespace) -> int:
    check_tenant_name(arguments.name)
    limits = parse_limits({"limits": given_limits(arguments)})
    await store.set_tenant(arguments.name, limits)
    _show(arguments.name, limits, arguments)
    return 0


def _show(name: str, limits: QuotaLimits, arguments: argparse.Namespace) -> None:
    given = msgspec.to_builtins(limits)
    if arguments.json:
        print_json({"object": "tenant", "name": name, "limits": given})
        return
    shown = " ".join(f"{limit}={value}" for limit, value in given.items()) if limits != NO_LIMITS else "no limits"
    sys.stdout.write(f"{strip_control(name)}: {shown}\n")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=_PROGRAM, usage=f"{_PROGRAM} COMMAND [OPTIONS] ...", description=_OVERVIEW, epilog=_EPILOG
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    chosen = add_command(commands, "set", "NAME", "Set the limits of a tenant, in the place of those before.", _PROGRAM)
    chosen.add_argument("name", metavar="NAME", help="the tenant of `sluice keys create --tenant NAME`")
    add_limits(chosen)
    add_command(commands, "list", "", "Show the tenants that have limits.", _PROGRAM)
    return parser
