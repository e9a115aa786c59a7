"""Members from a file of YAML or JSON, which is read again when it changes.

    client_key: gateway.key_secret
    engines:
      - name: a
        address: tcp://10.0.0.1:5557
        server_key: a.key

Instead of `engines` it may have `endpoints` in the form that llm-d's router discovers in a file: a name, the address of
a host, and a port.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import yaml

from sluice.addresses import host_and_port
from sluice.engine.fleet.membership.members import Member, check_members, never
from sluice.engine.yaml_text import load_yaml
from sluice.errors import SluiceError, invalid

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the file is looked at."""


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of the file's `engines`. An engine of twice the weight gets twice the requests."""

    name: str
    address: str
    weight: float = 1.0
    version: str = ""
    server_key: str | None = None
    client_key: str | None = None


class _Endpoint(msgspec.Struct, frozen=True):
    """An endpoint of llm-d, whose other fields are about HTTP."""

    name: str
    address: str
    port: int | str


class EnginesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file as a whole, which `sluice fleet` writes."""

    engines: tuple[EngineEntry, ...] = ()
    endpoints: tuple[_Endpoint, ...] = ()
    client_key: str | None = None
    """For engines that name none."""
    server_key: str | None = None


class FileMembership:
    """The members that a file names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        mark = await asyncio.to_thread(self._mark)
        members = await asyncio.to_thread(read_members, self._path)
        yield members
        while True:
            await asyncio.sleep(LOOK_S)
            before, mark = mark, await asyncio.to_thread(self._mark)
            if mark == before:
                continue
            try:
                found = await asyncio.to_thread(read_members, self._path)
            except SluiceError as error:
                log.error("%s; the %d engines that it had stay", error.message, len(members))
                continue
            if found != members:
                members = found
                yield members

    def _mark(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


def read_members(path: Path) -> tuple[Member, ...]:
    """Read a file. Raises INVALID, which names the file, the field, what it has and what was expected."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise invalid("engines", f"{path} cannot be read: {' '.join(str(error).split())}") from None
    try:
        found = msgspec.convert(content, EnginesFile)
        if len({"engines", "endpoints"} & content.keys()) != 1:
            raise invalid("engines", "there must be either engines or endpoints, each a list")
        members = (
            *(_of_engine(each, found) for each in found.engines),
            *(_of_endpoint(e, found) for e in found.endpoints),
        )
        members = tuple(_with_paths(each, path.parent) for each in members)
        check_members(members)
    except msgspec.ValidationError as error:
        raise invalid("engines", f"{path}: {error}") from None
    except SluiceError as error:
        raise error.reworded(f"{path}: {error.message}") from None
    return members


def write_members(path: Path, content: EnginesFile) -> bool:
    """Write the file, so that a reader finds the old list or the new one, whole. Returns whether it has changed. Raises
    OSError."""
    fields = msgspec.to_builtins(content)
    text = msgspec.yaml.encode(fields if content.endpoints else {**fields, "engines": fields.get("engines", [])})
    if path.is_file() and path.read_bytes() == text:
        return False
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(text)
    fresh.replace(path)
    return True


def _of_engine(engine: EngineEntry, file: EnginesFile) -> Member:
    return Member(
        name=engine.name,
        address=engine.address,
        server_key=engine.server_key or file.server_key,
        client_key=engine.client_key or file.client_key,
        version=engine.version,
        weight=engine.weight,
    )


def _of_endpoint(endpoint: _Endpoint, file: EnginesFile) -> Member:
    return Member(
        name=endpoint.name,
        address=f"tcp://{host_and_port(endpoint.address, endpoint.port)}",
        server_key=file.server_key,
        client_key=file.client_key,
    )


def _with_paths(member: Member, folder: Path) -> Member:
    """Resolve the files of keys, which are named from the file's folder."""
    keys = {name: getattr(member, name) for name in ("server_key", "client_key")}
    found = {name: str(folder / value) for name, value in keys.items() if value is not None}
    return msgspec.structs.replace(member, **found)
