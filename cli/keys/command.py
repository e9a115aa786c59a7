"""The command `sluice keys`: makes, shows, rotates and revokes API keys, in the store itself."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from time import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sluice.cli.errors import CommandError, reports_errors
from sluice.cli.terminal import confirm, strip_control
from sluice.errors import SluiceError
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.config import read_config
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OneLineParser, OptionError, argument_type
from sluice.gateway.tenancy.access.identity import QuotaLimits, RouteGroup
from sluice.gateway.tenancy.access.keys import (
    NewKey,
    StoredKey,
    describe_key,
    find_key,
    make_key,
    parse_fields,
    revoke_key,
    rotate_key,
    update_key,
)
from sluice.gateway.tenancy.access.store import KeyStore, open_keys

_OVERVIEW = """\
Make, show, rotate and revoke API keys. Servers that share the store follow within a second; none need run.

commands:
  create  make a key and print it: it is shown once
  list    show the keys
  show    show one key with all its rights
  update  change a key's rights; what is not named stays
  rotate  make a new text for a key; the old one still works for a while
  revoke  end a key
"""
_EPILOG = """\
examples:
  sluice keys create --name admin --groups admin,inference,embeddings,rag,repository,metrics
  sluice keys create --name ci --tenant research --requests-per-minute 60
  KEY=$(sluice keys create --name app --models 'rill*' --groups inference,embeddings --quiet)
  sluice keys update ci --requests-per-minute 120 --unset tokens_per_day,networks
  sluice keys rotate app --grace 1h
  sluice keys revoke ci --yes

Once a key exists, every request but those of health probes needs one. A name may also be a key's id.
Only a key with the group admin makes and changes keys over HTTP, and none gives a right that it does not have.

Exit codes: 0 when done, 1 where the store, a key or the answer said no, 2 for a bad option.
"""
_WIDE = 240
"""Columns of output that is no terminal: nothing is cut."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
STORE_FLAGS = ("--keys-store", "--state-path")
_LISTS = ("models", "adapters", "groups", "networks")
Run = Callable[[KeyStore, argparse.Namespace], Awaitable[int]]


@reports_errors("sluice keys")
def command(argv: list[str]) -> int:
    """Make, show, rotate and revoke API keys."""
    arguments = _parser().parse_args(argv)
    commands = {"create": _create, "list": _list, "show": _show, "update": _update, "rotate": _rotate}
    return asyncio.run(run_on_store(arguments, {**commands, "revoke": _revoke}[arguments.command]))


async def run_on_store(arguments: argparse.Namespace, run: Run) -> int:
    """Run a command on the store that the arguments name, and close it. Raises CommandError and OptionError."""
    config = read_config({flag: getattr(arguments, flag) for flag in STORE_FLAGS if getattr(arguments, flag)})
    place = config.access.store_place(config.state_folder())
    if place is None:
        raise OptionError("--keys-store is none: there is no store of keys")
    try:
        store = open_keys(place)
    except ValueError as error:
        raise OptionError(str(error)) from None
    try:
        return await run(store, arguments)
    except SluiceError as error:
        raise CommandError(error.message, USAGE_ERROR if error.param else FAILED) from None
    finally:
        await store.close()


async def _create(store: KeyStore, arguments: argparse.Namespace) -> int:
    new = make_key(parse_fields(_read_fields(arguments)))
    await store.add(new.stored)
    return _print_new(new, arguments)


def _read_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    fields = {
        name: given[name]
        for name in ("name", "tenant", "weight", "priorities", "subject", "caches", *_LISTS)
        if name in given
    }
    if "expires_in" in given:
        fields["expires_at"] = time() + given["expires_in"]
    if "metadata" in given:
        fields["metadata"] = dict(given["metadata"])
    fields["limits"] = given_limits(arguments)
    return fields


def given_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the limits that options give."""
    given = ((name, getattr(arguments, name)) for name in QuotaLimits.__struct_fields__)
    return {name: value for name, value in given if value is not None}


async def _update(store: KeyStore, arguments: argparse.Namespace) -> int:
    changes = _read_fields(arguments)
    del changes["name"]
    for name in arguments.unset or ():
        if name in QuotaLimits.__struct_fields__:
            changes["limits"][name] = None
        else:
            changes[name] = None
    return _print_key(await store.change(arguments.name, lambda key: update_key(key, changes)), arguments)


async def _rotate(store: KeyStore, arguments: argparse.Namespace) -> int:
    texts: list[str] = []

    def rotate(key: StoredKey) -> StoredKey:
        new = rotate_key(key, arguments.grace)
        texts.append(new.text)
        return new.stored

    stored = await store.change(arguments.name, rotate)
    return _print_new(NewKey(stored, texts[-1]), arguments)


async def _revoke(store: KeyStore, arguments: argparse.Namespace) -> int:
    key = find_key(await store.load(), arguments.name)
    if not arguments.yes:
        confirm(f"revoke the key {strip_control(key.name)}?", "--yes revokes without", "nothing was revoked")
    stored = await store.change(key.id, revoke_key)
    if arguments.json:
        return print_json(describe_key(stored))
    sys.stdout.write(f"key {strip_control(stored.name)} revoked\n")
    return 0


async def _show(store: KeyStore, arguments: argparse.Namespace) -> int:
    return _print_key(find_key(await store.load(), arguments.name), arguments)


def _print_key(key: StoredKey, arguments: argparse.Namespace) -> int:
    described = describe_key(key)
    if arguments.json:
        return print_json(described)
    for name, value in _flat(described):
        sys.stdout.write(f"{name + ':':<22} {strip_control(value)}\n")
    _say_rights(key)
    return 0


def _say_rights(key: StoredKey) -> None:
    """Warn on standard error about a key with admin rights, and about one whose groups were never named."""
    name = strip_control(key.name)
    if key.has_unnamed_admin:
        sys.stderr.write(
            f"the key {name} has admin rights and every other because its groups were never named; name them: "
            f"sluice keys update {name} --groups inference,embeddings,rag\n"
        )
    elif RouteGroup.ADMIN in key.identity.groups:
        sys.stderr.write(f"the key {name} has admin rights: it makes and changes keys, also over HTTP\n")


def _groups(key: StoredKey) -> str:
    unnamed = " (never named)" if key.has_unnamed_admin else ""
    return ",".join(sorted(key.identity.groups)) + unnamed


def _flat(described: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in described.items():
        if name.endswith("_at"):
            value = "never" if value is None else _date(value)
        elif isinstance(value, dict):
            value = " ".join(f"{key}={each}" for key, each in value.items()) or "none"
        elif isinstance(value, list | tuple):
            value = ", ".join(map(str, value)) or "any"
        lines.append((name, str(value)))
    return lines


async def _list(store: KeyStore, arguments: argparse.Namespace) -> int:
    keys = [each for each in await store.load() if each.is_active or arguments.all]
    if arguments.json:
        for each in keys:
            print_json(describe_key(each))
        return 0
    table = Table("name", "id", "state", "tenant", "groups", "models", "created", "expires", box=None, pad_edge=False)
    for each in keys:
        identity, state = each.identity, describe_key(each)["state"]
        expires = "never" if identity.expires_at is None else _date(identity.expires_at)
        row = (
            identity.name,
            each.id,
            state,
            identity.tenant,
            _groups(each),
            ",".join(identity.models),
            _date(each.created_at),
        )
        table.add_row(*map(strip_control, (*row, expires)))
    shown = table if keys else _explain_none(await store.load(), await store.had_keys(), store.place)
    Console(width=None if sys.stdout.isatty() else _WIDE).print(shown, markup=False)
    return 0


def _explain_none(all_keys: list[StoredKey], had_keys: bool, place: str) -> str:
    if all_keys:
        return "no key is active (--all shows the revoked ones): every request is refused"
    if had_keys:
        return f"no keys, and {place} had some: every request is refused until there is one"
    return "no keys: a server asks nobody for one, unless --keys-store or --require-keys says so"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")


def _print_new(new: NewKey, arguments: argparse.Namespace) -> int:
    if arguments.quiet:
        sys.stdout.write(f"{new.text}\n")
        _say_rights(new.stored)
    elif arguments.json:
        print_json({"key": new.text, **describe_key(new.stored)})
    else:
        sys.stdout.write(f"{new.text}\n")
        sys.stderr.write(f"the key {strip_control(new.stored.name)} ({new.stored.id}); it is not shown again\n")
        _say_rights(new.stored)
    return 0


def print_json(fields: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
    return 0


# -- arguments


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice keys", usage="sluice keys COMMAND [OPTIONS] ...", description=_OVERVIEW, epilog=_EPILOG
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    create = add_command(commands, "create", "--name NAME", "Make a key and print it. Only its digest is stored.")
    create.add_argument("--name", required=True, metavar="NAME", help="by which it is listed; no two keys share one")
    _add_rights(create)
    add_command(commands, "list", "", "Show the keys.").add_argument(
        "--all", action="store_true", help="revoked ones too"
    )
    _add_name(add_command(commands, "show", "NAME", "Show one key with all its rights."))
    update = add_command(commands, "update", "NAME", "Change a key's rights; its text and its things stay.")
    _add_name(update)
    _add_rights(update)
    update.add_argument(
        "--unset", type=_words, metavar="FIELD,...", help="limits and restrictions to remove: tokens_per_day,expires_at"
    )
    rotate = add_command(commands, "rotate", "NAME", "Make a new text for a key, whose rights and things stay.")
    _add_name(rotate)
    rotate.add_argument(
        "--grace",
        type=argument_type(_duration),
        default=86_400.0,
        metavar="TIME",
        help="how long the old text still works: 3600, 90m, 24h, 7d. Default: 24h",
    )
    for each in (create, rotate):
        each.add_argument("--quiet", action="store_true", help="print the key alone")
    revoke = add_command(
        commands, "revoke", "NAME", "End a key: servers refuse it within a second, and its batches end."
    )
    _add_name(revoke)
    revoke.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def add_command(
    commands: "argparse._SubParsersAction[OneLineParser]",
    name: str,
    operands: str,
    text: str,
    program: str = "sluice keys",
) -> OneLineParser:
    usage = f"{program} {name} [OPTIONS] {operands}".rstrip()
    parser: OneLineParser = commands.add_parser(name, prog=f"{program} {name}", usage=usage, description=text)
    add_options(parser, (AccessOptions, BatchOptions), only=STORE_FLAGS)
    parser.add_argument("--json", action="store_true", help="write JSON to standard output")
    return parser


def _add_name(parser: OneLineParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the key's name or id")


def _add_rights(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("--tenant", metavar="NAME", help="whose tokens and things its requests use; * lets them say. Default: its own")
    add("--weight", type=float, metavar="NUMBER", help="the tenant's share of an engine. Default: 1")
    add(
        "--priorities",
        type=argument_type(_range),
        metavar="FIRST:LAST",
        help="priorities of its requests, such as --priorities=-5:10; lower runs earlier. Default: all",
    )
    add(
        "--expires-in",
        type=argument_type(_duration),
        metavar="TIME",
        help="how long it works: 12h, 30d. Default: for ever",
    )
    add("--models", type=_words, metavar="GLOB,...", help="models that it may use. Default: *")
    add("--adapters", type=_words, metavar="GLOB,...", help="LoRA adapters that it may use. Default: *")
    add(
        "--groups",
        type=_words,
        metavar="GROUP,...",
        help="routes that it may use: inference, embeddings, rag, repository, admin, metrics. Only admin makes and "
        "changes keys. Default: inference,embeddings,rag",
    )
    add("--networks", type=_words, metavar="NETWORK,...", help="where its requests may come from. Default: anywhere")
    add("--subject", metavar="NAME", help="common name of client certificates that stand for it (gRPC with mutual TLS)")
    add("--cache", action="store_true", default=None, dest="caches", help="keep its answers for equal requests")
    add("--metadata", type=argument_type(_pair), action="append", metavar="NAME=VALUE", help="a note. May be repeated")
    add_limits(parser)


def add_limits(parser: OneLineParser) -> None:
    """Add an option for each limit."""
    for field in msgspec.structs.fields(QuotaLimits):
        kind = int if "int" in str(field.type) else float
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="NUMBER", help=f"limit: {field.name.replace('_', ' ')}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if match is None:
        raise ValueError("a time such as 3600, 90m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _range(text: str) -> tuple[int, int]:
    with suppress(ValueError):
        first, _, last = text.partition(":")
        return int(first), int(last)
    raise ValueError("two whole numbers, such as 0:10")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("NAME=VALUE")
    return name, value
