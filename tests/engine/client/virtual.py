"""Engines without processes, sockets and time: the real client, link, transport and executor on one event loop, whose
time is virtual. The wire between them breaks where a test says."""

import asyncio
import inspect
import selectors
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
import zmq

from engine.arrays import FloatArray
from engine.client.process import EngineProcess, ProcessEngineClient
from engine.config import EngineConfig
from engine.frames import LoadFailed, Ready
from engine.loop.executor import InflightExecutor
from engine.process.transport import Transport
from engine.runners.base import Runner, StepBatch
from sluice.errors import SluiceError
from tests.engine.client.faulty_engine import CRASH, HANG
from tests.engine.fake_runner import EchoRunner

P = ParamSpec("P")

STEP_S = 0.01
"""Virtual seconds from a step to the next."""
LOAD_S = 1.0
HEARTBEAT_TIMEOUT_S = 10.0
KILLED = -9
_LAUNCHER = b"launcher"


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
        """Call the reader of a socket of a `Wire`."""
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


class Wire:
    """Both ends of a connection, in place of a ZeroMQ context: a ROUTER for the engine, a DEALER for its client."""

    def __init__(self) -> None:
        self.to_engine: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.on_frame: Callable[[bytes], bytes | None] = lambda content: content
        """Sees what the engine sends and returns what comes, None for nothing."""
        self.is_deaf = False
        """Whether what the client sends is lost."""
        self.client_number = 0
        """The file number of the client's socket, once it is connected."""

    def socket(self, kind: int) -> "_Socket":
        return _Router(self) if kind == zmq.ROUTER else _Dealer(self)

    def term(self) -> None:
        pass


class _Socket:
    """Either end, with as much of a ZeroMQ socket as it is asked for."""

    linger = 0
    closed = False
    _numbers = iter(range(-2, -1_000_000, -1))

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._number = next(self._numbers)

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        self.closed = True

    def set_hwm(self, value: int) -> None:
        pass

    def setsockopt(self, option: int, value: int) -> None:
        pass


class _Dealer(_Socket):
    def connect(self, endpoint: str) -> None:
        self.wire.client_number = self._number

    def send(self, content: bytes, flags: int = 0) -> None:
        if not self.wire.is_deaf:
            self.wire.to_engine.append(content)

    def recv(self, flags: int = 0) -> bytes:
        if not self.wire.to_client:
            raise zmq.Again
        return self.wire.to_client.popleft()

    def get(self, option: int) -> int:
        return int(zmq.POLLIN) if self.wire.to_client else 0


class _Router(_Socket):
    def bind(self, endpoint: str) -> None:
        pass

    def poll(self, timeout_ms: int) -> int:
        return 0

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.wire.to_engine:
            raise zmq.Again
        return [_LAUNCHER, self.wire.to_engine.popleft()]

    def send_multipart(self, parts: Sequence[bytes], flags: int = 0) -> None:
        content = self.wire.on_frame(parts[1])
        if content is not None:
            self.wire.to_client.append(content)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.signal(self.wire.client_number)


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
        return super().compute(batch)

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


class VirtualEngine(EngineProcess):
    """An engine on the event loop of its client."""

    def __init__(self, plan: Plan) -> None:
        self.wire = Wire()
        self.wire.on_frame = self._pass
        super().__init__(self.wire)  # type: ignore[arg-type]
        self._plan = plan
        self.fault = plan.faults.pop(0) if plan.faults else None
        self.num_frames = 0
        """Messages since it was ready."""
        self._is_ready = self._is_over = False
        self.task: asyncio.Task[None] | None = None
        """Runs the engine. It raises what would end a real process."""
        plan.engines.append(self)

    @property
    def pid(self) -> int | None:
        return None if self._exit is None else id(self)

    async def _start(self, command: Sequence[str]) -> asyncio.Future[int]:
        content = Path(command[-1]).read_bytes()  # noqa: ASYNC240 - time stands still
        config = msgspec.json.decode(content, type=EngineConfig)
        self.task = asyncio.create_task(self._run(config), name="virtual-engine")
        self.task.add_done_callback(lambda task: None if self.wire.is_deaf else self._end(1))
        return asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        super().kill()
        self._end(KILLED)

    async def _run(self, config: EngineConfig) -> None:
        loads = self._plan.load_s
        await asyncio.sleep((loads.pop(0) if len(loads) > 1 else loads[0]) if loads else LOAD_S)
        clock = asyncio.get_running_loop().time
        transport = Transport("", self.wire, clock)  # type: ignore[arg-type]
        transport.await_launcher()
        try:
            runner = self._plan.make_runner()
        except SluiceError as error:
            transport.send_all(LoadFailed(error.code, error.message))
            return
        executor = InflightExecutor(runner, config, transport, transport.emit, clock)
        transport.offer_prefixes(executor.kv.pool)
        transport.offer_view(executor.view)
        transport.send_all(Ready(executor.info))
        self._is_ready = True
        while not self._is_over and not executor._is_shut_down:
            try:
                executor.step()
            except ProcessDiedError:
                self._end(KILLED)
            except HangsError:
                self._fall_silent()
            else:
                executor.check_invariants()
            await asyncio.sleep(STEP_S)
        if not self.wire.is_deaf:
            self._end(0)

    def _pass(self, content: bytes) -> bytes | None:
        """Count a message of the engine, and break the wire before the one of the fault."""
        if self._is_over or self.wire.is_deaf:
            return None
        number = self.num_frames
        self.num_frames += self._is_ready
        if self.fault is None or not self._is_ready or number < self.fault.before_frame:
            return content
        match self.fault.how:
            case Break.ENDED:
                self._end(KILLED)
                return None
            case Break.UNREAD:
                self._end(KILLED)
                return content
            case Break.SILENT:
                self._fall_silent()
                return None
            case Break.CUT:
                self._fall_silent()
                return content[: len(content) // 2]

    def _fall_silent(self) -> None:
        self.wire.is_deaf = True
        self._is_over = True

    def _end(self, code: int) -> None:
        self._is_over = True
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(code)


class VirtualClient(ProcessEngineClient):
    """The client of virtual engines, which follow a plan."""

    def __init__(self, plan: Plan, config: EngineConfig) -> None:
        self.plan = plan
        self._loop = asyncio.get_running_loop()
        super().__init__(config, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, module="virtual", clock=self._loop.time)

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


@asynccontextmanager
async def virtual(plan: Plan | None = None, **limits: object) -> AsyncIterator[VirtualClient]:
    """Start the client of virtual engines. Raises what one of them has failed with."""
    fields = {"model_path": "", "max_num_seqs": 8, "max_num_batched_tokens": 16, **limits}
    client = VirtualClient(plan or Plan(), msgspec.convert(fields, EngineConfig))
    try:
        await client.start()
        yield client
    finally:
        await client.stop()
    for engine in client.plan.engines:
        if engine.task is not None and engine.task.done():
            engine.task.result()
