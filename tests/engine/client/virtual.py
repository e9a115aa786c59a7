"""Engines without processes, sockets and time: the real clients, links, transport and executor on one event loop, whose
time is virtual, over a network in memory that breaks where a test says."""

import asyncio
import inspect
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
import zmq

from sluice.engine.arrays import FloatArray
from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.process import EngineProcess, ProcessEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.frames import LoadFailed, Ready
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.process.block_exchange import SocketExchange
from sluice.engine.process.transport import Transport
from sluice.engine.runners.base import Runner, StepBatch
from sluice.errors import SluiceError
from tests.engine.client.faulty_engine import CRASH, HANG, without_poison
from tests.engine.client.network import Network, Router
from tests.engine.fake_runner import EchoRunner

P = ParamSpec("P")

STEP_S = 0.01
"""Virtual seconds from a step to the next."""
LOAD_S = 1.0
HEARTBEAT_TIMEOUT_S = 10.0
KILLED = -9


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time moves only where everything waits, and then to the next timer at once."""

    def __init__(self) -> None:
        self._now = 0.0
        self._readers: dict[int, Callable[[], object]] = {}
        super().__init__(_NoWaiting(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float | None) -> None:
        assert seconds is not None, "everything waits, and nothing will ever happen"
        self._now += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run it at once: time must not pass beside a thread."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        if fd >= 0:
            super().add_reader(fd, callback, *args)
        else:
            self._readers[fd] = callback

    def remove_reader(self, fd: Any) -> bool:
        return super().remove_reader(fd) if fd >= 0 else self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Call the reader of a socket of a `Network`."""
        if fd in self._readers:
            self.call_soon(self._readers[fd])


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout != 0:
            self._loop.advance(timeout)
        return found


def in_virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test on a `VirtualLoop`."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_awaited(test(*arguments, **named)))

    del run.__wrapped__  # pytest would take it for a coroutine
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


async def _awaited(work: Awaitable[None]) -> None:
    await work


class Break(Enum):
    """How a wire breaks."""

    ENDED = "the engine ends"
    UNREAD = "the engine ends, and its last message is not read yet"
    SILENT = "the engine neither hears nor says anything"
    CUT = "half a message comes"


@dataclass
class Fault:
    """A break before the frame of this number, from the first after the engine is ready."""

    how: Break
    before_frame: int = 0


class ProcessDiedError(BaseException):
    """Raised by a runner whose process is to end."""


class HangsError(BaseException):
    """Raised by a runner that is never to return."""


class FaultyRunner(EchoRunner):
    """Ends its process when it reads CRASH, and never returns when it reads HANG. It takes any adapter."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2048, max_model_len=16_384)

    def compute(self, batch: StepBatch) -> FloatArray:
        if CRASH in batch.token_ids:
            raise ProcessDiedError
        if HANG in batch.token_ids:
            raise HangsError
        return without_poison(super().compute(batch))

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        return lambda: None

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        return lambda: None


@dataclass
class Plan:
    """A plan says what becomes of a client's engines, one after the other. One without a fault goes on for ever."""

    faults: list[Fault] = field(default_factory=list)
    make_runner: Callable[[], Runner] = FaultyRunner
    """Makes the runner of the next engine, or raises what its load fails with."""
    load_s: list[float] = field(default_factory=list)
    """How long the next engines take to load; the last holds for all others."""
    engines: list["VirtualEngine"] = field(default_factory=list)
    """All that were started."""
    network: Network = field(default_factory=Network)


class VirtualEngine(EngineProcess):
    """An engine on the event loop of its client."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.network)  # type: ignore[arg-type]
        self._plan = plan
        self.fault = plan.faults.pop(0) if plan.faults else None
        self.num_frames = 0
        """Messages since it was ready."""
        self._is_ready = self._is_over = self._is_silent = self._is_stopped = False
        self._transport: Transport | None = None
        self.task: asyncio.Task[None] | None = None
        """Runs the engine. It raises what would end a real process."""
        plan.engines.append(self)

    @property
    def pid(self) -> int | None:
        return None if self._exit is None else id(self)

    @property
    def router(self) -> Router:
        """Its socket."""
        assert self._transport is not None
        router: Any = self._transport._socket
        assert isinstance(router, Router)
        return router

    async def _start(self, command: Sequence[str]) -> asyncio.Future[int]:
        endpoint, *_, file = command[-4:]
        config = msgspec.json.decode(Path(file).read_bytes(), type=EngineConfig)  # noqa: ASYNC240 - time stands still
        self.task = asyncio.create_task(self._run(config, endpoint), name="virtual-engine")
        self.task.add_done_callback(lambda task: None if self._is_silent else self.end(1))
        return asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        super().kill()
        self.end(KILLED)

    def stop(self) -> None:
        """Stand still until `go_on`, as a process does that is stopped."""
        self._is_stopped = True

    def go_on(self) -> None:
        self._is_stopped = False

    async def _run(self, config: EngineConfig, endpoint: str) -> None:
        clock, network = asyncio.get_running_loop().time, self._plan.network
        transport = self._transport = Transport(endpoint, network, clock)  # type: ignore[arg-type]
        self.router.on_frame = self._pass
        while not transport._clients:
            await asyncio.sleep(STEP_S)
            with suppress(zmq.Again):
                transport.await_launcher()
        loads = self._plan.load_s
        try:
            transport.listen(config.listening)
            await asyncio.sleep((loads.pop(0) if len(loads) > 1 else loads[0]) if loads else LOAD_S)
            runner = self._plan.make_runner()
            exchange = SocketExchange(transport, config.listening)
            exchange._context = network  # type: ignore[assignment]
            executor = InflightExecutor(runner, config, transport.receive, transport.emit, clock, exchange=exchange)
        except SluiceError as error:
            transport.send_all(LoadFailed(error.code, error.message))
            return
        transport.offer_prefixes(executor.kv.pool)
        transport.offer_view(executor.view)
        transport.send_all(Ready(executor.info))
        self._is_ready = True
        while not self._is_over and not executor._is_shut_down:
            try:
                executor.step()
            except ProcessDiedError:
                self.end(KILLED)
            except HangsError:
                self._fall_silent()
            else:
                executor.check_invariants()
            await asyncio.sleep(STEP_S)
            if not self._is_over and not executor._is_shut_down:
                await self.router.until_arrival(executor._idle_wait_s())
            while self._is_stopped and not self._is_over:
                await asyncio.sleep(STEP_S)
        exchange.close()
        if not self._is_silent:
            self.end(0)

    def _pass(self, content: bytes) -> bytes | None:
        """Count a message of the engine, and break the wire before the one of the fault."""
        if self._is_over or self.router.is_deaf:
            return None
        number = self.num_frames
        self.num_frames += self._is_ready
        if self.fault is None or not self._is_ready or number < self.fault.before_frame:
            return content
        match self.fault.how:
            case Break.ENDED:
                self.end(KILLED)
                return None
            case Break.UNREAD:
                self.end(KILLED)
                return content
            case Break.SILENT:
                self._fall_silent()
                return None
            case Break.CUT:
                self._fall_silent()
                return content[: len(content) // 2]

    def _fall_silent(self) -> None:
        self.router.is_deaf = self._is_over = self._is_silent = True

    def end(self, code: int = KILLED) -> None:
        """End at once. Nothing happens to one that has ended."""
        self._is_over = True
        if self._transport is not None and not self.router.closed:
            self.router.close()
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(code)


class VirtualClient(ProcessEngineClient):
    """The client of virtual engines, which follow a plan."""

    def __init__(self, plan: Plan, config: EngineConfig, **options: Any) -> None:
        self.plan = plan
        self._loop = asyncio.get_running_loop()
        options |= {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "module": "virtual", "clock": self._loop.time}
        super().__init__(config, **options)

    def now(self) -> float:
        return self._loop.time()

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which nothing runs."""
        assert isinstance(self._loop, VirtualLoop)
        self._loop.advance(seconds)

    def break_wire(self, how: Break = Break.ENDED) -> None:
        """Break the wire before the newest engine's next message."""
        self.engine.fault = Fault(how)

    def _make_process(self) -> EngineProcess:
        return VirtualEngine(self.plan)

    @property
    def engine(self) -> VirtualEngine:
        """The newest engine."""
        return self.plan.engines[-1]

    def check(self) -> None:
        """Raise what one of its engines has failed with."""
        for engine in self.plan.engines:
            if engine.task is not None and engine.task.done():
                engine.task.result()


class VirtualAttached(AttachedEngineClient):
    """A client beside the launcher of virtual engines, at a place of their network."""

    def __init__(self, network: Network, config: EngineConfig, place: Path | str, **options: Any) -> None:
        super().__init__(config, place, clock=asyncio.get_running_loop().time, **options)
        self._context.term()
        self._context = network  # type: ignore[assignment]


def virtual_config(**limits: object) -> EngineConfig:
    """Return the configuration of small engines."""
    fields = {"model_path": "", "max_num_seqs": 8, "max_num_batched_tokens": 16, **limits}
    return msgspec.convert(fields, EngineConfig)


@asynccontextmanager
async def virtual(plan: Plan | None = None, **limits: object) -> AsyncIterator[VirtualClient]:
    """Start the client of virtual engines. Raises what one of them has failed with."""
    client = VirtualClient(plan or Plan(), virtual_config(**limits))
    try:
        await client.start()
        yield client
    finally:
        await client.stop()
    client.check()
