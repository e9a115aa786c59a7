"""One worker from the host's side: its process, its link, and what it says."""

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from time import monotonic

import msgspec

from sluice.gateway.workers.counts import WorkerCounts
from sluice.gateway.workers.messages import (
    AskCounts,
    AskRequests,
    AskTimelines,
    Counts,
    Drain,
    FoundTimelines,
    Linked,
    Requests,
    Reserve,
    Served,
    Settle,
    ToHost,
    Welcome,
)
from sluice.gateway.workers.quotas import QuotaDesk
from sluice.gateway.workers.wire import Wire
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.sharing import SharedModel
from sluice.record.timelines import Timeline, TimelineOwner

log = logging.getLogger(__name__)

_MODULE = "sluice.gateway.workers"
_DECODER: "msgspec.msgpack.Decoder[ToHost]" = msgspec.msgpack.Decoder(ToHost)
_IDS = itertools.count(1)
_EXIT_S = 5.0
"""How long a process may take to end after it has closed its link."""
WorkerAnswer = Requests | FoundTimelines


class WorkerProcess:
    """A worker from its start to its end. It is `start`ed once."""

    def __init__(self, counts: WorkerCounts, desk: QuotaDesk) -> None:
        """`counts` keeps what it counts; `desk` answers it alone."""
        self.id = next(_IDS)
        self._counts = counts
        self._desk = desk
        self._process: asyncio.subprocess.Process | None = None
        self._link: Wire[ToHost] | None = None
        self._heard_at = monotonic()
        self._served: frozenset[str] = frozenset()
        self._stays: dict[str, ExitStack] = {}
        """The models whose engine it may use, by id, each kept from closing."""
        self._answers: dict[int, asyncio.Future[WorkerAnswer | None]] = {}
        self._numbers = itertools.count(1)
        self._linked: frozenset[str] = frozenset()
        self.is_linked = asyncio.Event()
        """Set while it is there and serves the models that it should."""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The process's exit code."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def silence_s(self) -> float:
        """How long it has said nothing, which it does every second."""
        return monotonic() - self._heard_at

    async def start(self, listener: socket.socket, welcome: Welcome) -> None:
        """Start the process, which accepts connections of `listener` as soon as it can. Raises OSError."""
        own, others = socket.socketpair()
        own.setblocking(False)
        with others:
            fds = others.fileno(), listener.fileno()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, *map(str, fds)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # a terminal's signals are the host's
            )
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_connection(lambda: Wire[ToHost](_DECODER), sock=own)
        self._link.send(welcome)
        self._heard_at = monotonic()
        self._following = asyncio.create_task(self._follow(self._process, self._link), name=f"worker {self.id}")

    def serve(self, models: dict[str, tuple[SharedModel, LlmModel]]) -> None:
        """Have it serve these models, by id, which do not close as long as it uses them."""
        self._served = frozenset(models)
        if not self._served <= self._linked:
            self.is_linked.clear()
        for id_, (_, model) in models.items():
            if id_ not in self._stays:
                self._stays[id_] = ExitStack()
                self._stays[id_].enter_context(model.guests)
        self._send(Served([shared for shared, _ in models.values()]))

    def drain(self, *, refuses: bool = False) -> None:
        """Let it end with its open requests."""
        self._send(Drain(refuses))

    async def ask_counts(self, timeout_s: float) -> None:
        """Have it say now what it has counted. One that does not within `timeout_s` has said so before."""
        await self._ask(AskCounts(next(self._numbers)), timeout_s)

    async def ask_requests(self, timeout_s: float, cancel: str = "") -> Requests | None:
        """Return its open generations, where it says them within `timeout_s`. Those of the id `cancel` end first."""
        answer = await self._ask(AskRequests(next(self._numbers), cancel), timeout_s)
        return answer if isinstance(answer, Requests) else None

    async def ask_timelines(self, timeout_s: float, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return its timelines of a request id, or all for ""; none where it does not say them within `timeout_s`."""
        answer = await self._ask(AskTimelines(next(self._numbers), request_id, owner), timeout_s)
        return answer.timelines if isinstance(answer, FoundTimelines) else []

    async def _ask(self, question: AskCounts | AskRequests | AskTimelines, timeout_s: float) -> WorkerAnswer | None:
        answer = self._answers[question.number] = asyncio.get_running_loop().create_future()
        self._send(question)
        await asyncio.wait((answer,), timeout=timeout_s)
        self._answers.pop(question.number, None)
        return answer.result() if answer.done() else None

    def kill(self) -> None:
        """End it now."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _follow(self, process: asyncio.subprocess.Process, link: Wire[ToHost]) -> None:
        """Take what it says until it ends."""
        try:
            while (message := await link.read()) is not None:
                self._heard_at = monotonic()
                await self._take(message, link)
        except Exception:
            log.exception("worker %d says what nobody understands; it is ended", self.id)
        link.close()
        try:
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
        except TimeoutError:
            self.kill()
        code = await process.wait()
        self._counts.end(self.id)
        self._desk.close()
        self._release(self._stays.keys())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(None)
        self.ended.set_result(code)

    async def _take(self, message: ToHost, link: Wire[ToHost]) -> None:
        match message:
            case Counts(number, families):
                self._counts.keep(self.id, families)
                self._answer(number, None)
            case Requests(number) | FoundTimelines(number):
                self._answer(number, message)
            case Linked(ids, attaching):
                self._linked = frozenset(ids)
                self._release(self._stays.keys() - self._served - self._linked - set(attaching))
                if self._served <= self._linked:
                    self.is_linked.set()
            case Reserve():
                link.send(await self._desk.reserve(message))
            case Settle():
                self._desk.settle(message)

    def _answer(self, number: int, found: WorkerAnswer | None) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def _release(self, ids: Iterable[str]) -> None:
        for id_ in list(ids):
            self._stays.pop(id_).close()
