"""Members from the EndpointSlices of a Kubernetes service, which the API server reports as they change.

The pod's service account must be allowed to list and watch EndpointSlices. What is read and why:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes.
"""

import asyncio
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from sluice.addresses import host_and_port
from sluice.engine.fleet.membership import SCHEME
from sluice.engine.fleet.membership.members import Member, check_members, never
from sluice.errors import SluiceError, invalid

log = logging.getLogger(__name__)

PORT_NAME = "engine"
"""The port's name, where a service has several."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the authority of its API server."""
_SERVICE = re.compile(SCHEME + r"([a-z0-9-]+)/([a-z0-9.-]+)")
_WATCH_S = 300.0
"""How long a watch lasts before another is asked for, as the API server would end it by itself."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
"""Pauses before an API server that failed is asked again; each is twice as long as the one before."""
_SILENT_S = 30.0
"""Seconds that the API server may take beyond that to say something."""


class _Metadata(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Conditions(msgspec.Struct):
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions | None = None
    target: _Target | None = msgspec.field(default=None, name="targetRef")


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct):
    """An EndpointSlice of discovery.k8s.io/v1, as far as it is read."""

    metadata: _Metadata
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _SliceList(msgspec.Struct):
    metadata: _Metadata
    items: tuple[_Slice, ...] = ()


class _Change(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _WatchEndedError(Exception):
    """The watch cannot go on from where it was: the slices are to be listed anew."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is, and how it knows this pod."""

    url: str
    account: Path = ACCOUNT

    @classmethod
    def of_pod(cls) -> "ApiServer":
        """Find it by the variables that every pod has. Raises INVALID outside of a pod."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))  # noqa: TID251 - Kubernetes sets them
        if not host or not port:
            message = f"engines of {SCHEME} are found from within a pod: KUBERNETES_SERVICE_HOST and _PORT are not set"
            raise invalid("engines", message)
        return cls(f"https://{host_and_port(host, port)}")

    def client(self) -> httpx.AsyncClient:
        """Make a client that trusts the cluster's authority. The file is not there where the URL is plain HTTP."""
        authority = self.account / "ca.crt"
        verify = ssl.create_default_context(cafile=str(authority)) if authority.is_file() else True
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=httpx.Timeout(10.0))

    def headers(self) -> dict[str, str]:
        """Return the headers of a request. The token is read each time, because the cluster replaces it."""
        token = self.account / "token"
        return {"authorization": f"Bearer {token.read_text().strip()}"} if token.is_file() else {}


class KubernetesMembership:
    """The endpoints of a service that are not about to end.

    One that is not ready counts too: whether an engine serves is told by its own heartbeat. While the API server cannot
    be reached, the engines that it named last stay.
    """

    def __init__(
        self,
        service: str,
        api: ApiServer,
        *,
        server_key: str | None = None,
        client_key: str | None = None,
    ) -> None:
        """`service` is k8s://NAMESPACE/NAME. Raises INVALID for another form."""
        found = _SERVICE.fullmatch(service)
        if found is None:
            raise invalid("engines", f"engines in Kubernetes are named by {SCHEME}NAMESPACE/SERVICE, got {service!r}")
        self._namespace, self._name = found[1], found[2]
        self._api = api
        self._server_key, self._client_key = server_key, client_key
        self._slices: dict[str, _Slice] = {}

    async def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] = ()
        delay_s = 0.0
        async with await asyncio.to_thread(self._api.client) as client:
            while True:
                try:
                    version = await self._list(client)
                    delay_s = 0.0
                    if (found := self._members(last)) != last:
                        last = found
                        yield last
                    async for _ in self._follow(client, version):
                        if (found := self._members(last)) != last:
                            last = found
                            yield last
                except _WatchEndedError:
                    continue
                except (httpx.HTTPError, OSError, ValueError, RecursionError) as error:
                    delay_s = min(max(2.0 * delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
                    reason = " ".join(str(error).split()) or type(error).__name__
                    log.warning("Kubernetes does not name engines now: %s; the %d that it had stay", reason, len(last))
                    await asyncio.sleep(delay_s)

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Read all slices. Returns the version from which changes are to be watched."""
        answer = await client.get(self._path, params=self._selector, headers=self._api.headers())
        _check(answer.status_code, answer.content)
        found = msgspec.json.decode(answer.content, type=_SliceList)
        self._slices = {each.metadata.name: each for each in found.items}
        return found.metadata.resource_version

    async def _follow(self, client: httpx.AsyncClient, version: str) -> AsyncIterator[str]:
        """Take in changes after `version`, watch after watch; yields the version after each."""
        while True:
            asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(int(_WATCH_S))}
            parameters = {**self._selector, **asked, "resourceVersion": version}
            patience = httpx.Timeout(10.0, read=_WATCH_S + _SILENT_S)
            request = client.stream("GET", self._path, params=parameters, headers=self._api.headers(), timeout=patience)
            async with request as answer:
                if answer.status_code != 200:
                    _check(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line:
                        version = self._take(msgspec.json.decode(line, type=_Change))
                        yield version

    def _take(self, change: _Change) -> str:
        if change.type == "ERROR":  # 410 Gone as a rule: what changed since that version is no longer kept
            raise _WatchEndedError
        found = msgspec.json.decode(change.object, type=_Slice)
        if change.type in ("ADDED", "MODIFIED"):
            self._slices[found.metadata.name] = found
        elif change.type == "DELETED":
            self._slices.pop(found.metadata.name, None)
        return found.metadata.resource_version

    def _members(self, last: tuple[Member, ...]) -> tuple[Member, ...]:
        """Return the members that the slices name, `last` where they name something that cannot be used."""
        found: dict[str, Member] = {}
        for each in self._slices.values():
            port = _port(each)
            for endpoint in each.endpoints or ():
                is_ending = endpoint.conditions is not None and endpoint.conditions.terminating
                if port is None or is_ending or not endpoint.addresses:
                    continue
                host = endpoint.addresses[0]
                name = endpoint.target.name if endpoint.target is not None and endpoint.target.name else host
                address = f"tcp://{host_and_port(host, port)}"
                found[name] = Member(
                    name=name, address=address, server_key=self._server_key, client_key=self._client_key
                )
        members = tuple(found[name] for name in sorted(found))
        try:
            check_members(members)
        except SluiceError as error:
            log.error("endpoints of %s/%s: %s", self._namespace, self._name, error.message)
            return last
        return members

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"

    @property
    def _selector(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._name}"}


def _port(found: _Slice) -> int | None:
    """Return the port of the engines: the one with that name, or the only one."""
    ports = [each for each in found.ports or () if each.port is not None]
    named = [each for each in ports if each.name == PORT_NAME]
    return (named or ports)[0].port if named or len(ports) == 1 else None


def _check(status: int, body: bytes) -> None:
    """Raise where the API server refused a request: _WatchEndedError where it no longer has the version."""
    if status == 410:
        raise _WatchEndedError
    if status != 200:
        raise OSError(f"the API server answers {status}: {body[:200].decode(errors='replace')}")
