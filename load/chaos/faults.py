"""The faults: what each does to the fleet, and what that excuses."""

import asyncio
import json
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil

from sluice.bundled import BUNDLED_MODEL
from sluice.load.chaos.fleet import (
    ECHO,
    ENGINE,
    HEARTBEAT_TIMEOUT_S,
    PYTHON_WORKER,
    WORKER,
    FaultSpan,
    Fleet,
    FleetError,
    Gateway,
)
from sluice.load.chaos.processes import Program

_LONG = {"model": BUNDLED_MODEL, "prompt": "Once", "max_tokens": 800, "ignore_eos": True, "temperature": 0}
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SMALL_BUFFER = 4096


async def read_slowly(gateway: Gateway, num_clients: int, seconds: float) -> None:
    """Ask for long streams and read none of them, then leave."""
    body = json.dumps({**_LONG, "stream": True}).encode()
    await asyncio.gather(*(_hold(gateway.port, _request(body), seconds) for _ in range(num_clients)))


async def hold_half_open(gateway: Gateway, num_clients: int, seconds: float) -> None:
    """Open connections on the ports of HTTP and gRPC that say nothing, or stop in the middle of a request."""
    body = json.dumps(_LONG).encode()
    starts = (b"", b"POST /v1/comple", _request(body)[:-20], _HTTP2_PREFACE, _HTTP2_PREFACE + b"\x00\x00\x40\x01\x04")
    ports = (gateway.port, gateway.grpc_port)
    await asyncio.gather(*(_hold(ports[n % 2], starts[n % len(starts)], seconds) for n in range(num_clients)))


async def send_garbage(gateway: Gateway, rng: random.Random, num_clients: int) -> None:
    """Send what is no request to the ports of HTTP and gRPC, and JSON that is no body."""
    pieces = [rng.randbytes(rng.randint(1, 1 << 14)) for _ in range(num_clients)]
    pieces += [_HTTP2_PREFACE + piece for piece in pieces[: num_clients // 2]]
    pieces += [_request(piece) for piece in pieces[: num_clients // 2]]
    pieces += [_request(b'{"prompt": ' + b"[" * 50_000), b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000]
    ports = (gateway.port, gateway.grpc_port)
    await asyncio.gather(*(_hold(port, piece, 1.0) for piece in pieces for port in ports))


def _request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _hold(port: int, sent: bytes, seconds: float) -> None:
    """Send bytes, read nothing for a time, and drop the connection."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds + 5):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=_SMALL_BUFFER)
            try:
                writer.write(sent)
                await asyncio.sleep(seconds)
            finally:
                writer.transport.abort()


SETTLING_S = 5.0
"""Seconds after a worker's replacement in which connections of the lost one may still be noticed."""
_REPLACED_S = 90.0
_RESTART_ATTEMPTS = 5
_SMALL_FILE_BYTES = 4096
_SKIPPED = "nothing was done: "
_LONGEST_JUMP_MIN = 7 * 24 * 60


@dataclass(slots=True)
class Faults:
    """Does things to a fleet. Each method named `fault_*` is a fault: it returns what it did, once that is over."""

    fleet: Fleet
    errors: list[str] = field(default_factory=list)
    """The parts that should have come back after a fault and did not."""

    async def run(self, name: str, seed: int) -> str:
        """Run a fault to its end, and return its description."""
        fault: Callable[[random.Random], Awaitable[str]] = getattr(self, f"fault_{name}")
        return await fault(random.Random(seed))

    async def fault_engine_kill(self, rng: random.Random) -> str:
        """Kill an engine's process."""
        return self._signal_engine(rng, signal.SIGKILL)[1]

    async def fault_engine_stop(self, rng: random.Random) -> str:
        """Stop an engine's process, and let it go on; what takes too long is taken for a hang."""
        process, done = self._signal_engine(rng, signal.SIGSTOP)
        seconds = rng.uniform(0.2, 1.5 * HEARTBEAT_TIMEOUT_S)
        await asyncio.sleep(seconds)
        _send(process, signal.SIGCONT)
        return f"{done} for {seconds:.1f} s"

    def _signal_engine(self, rng: random.Random, number: signal.Signals) -> tuple[psutil.Process | None, str]:
        programs = [*(each.program for each in self.fleet.gateways), *self.fleet.launchers]
        found = [(each.name, process) for each in programs if each.is_running for process in each.children(ENGINE)]
        if not found:
            return None, f"{_SKIPPED}no engine runs"
        name, process = rng.choice(found)
        _send(process, number)
        return process, f"{number.name} to an engine of {name}"

    async def fault_launcher_kill(self, rng: random.Random) -> str:
        """Kill an engine with its launcher, as if its machine were lost, and start it again."""
        if not self.fleet.launchers:
            return f"{_SKIPPED}no engine has registered"
        launcher = rng.choice(self.fleet.launchers)
        async with launcher.replacing:
            await launcher.kill()
            await asyncio.sleep(rng.uniform(0, 2 * HEARTBEAT_TIMEOUT_S))
            await self._start_again(launcher)
        return f"{launcher.name} was killed and started again"

    async def fault_worker_kill(self, rng: random.Random) -> str:
        """Kill an HTTP worker."""
        return await self._lose_worker(rng, signal.SIGKILL, 0)

    async def fault_worker_stop(self, rng: random.Random) -> str:
        """Stop an HTTP worker, and let it go on; what takes too long is taken for a hang."""
        return await self._lose_worker(rng, signal.SIGSTOP, rng.uniform(0.2, 1.5 * HEARTBEAT_TIMEOUT_S))

    async def _lose_worker(self, rng: random.Random, number: signal.Signals, seconds: float) -> str:
        gateway = self.fleet.gateways[1]
        workers = gateway.processes(WORKER)
        if not workers or gateway.is_restarting:
            return f"{_SKIPPED}no worker runs"
        worker = rng.choice(workers)
        async with gateway.cut(SETTLING_S):
            _send(worker, number)
            await asyncio.sleep(seconds)
            _send(worker, signal.SIGCONT)
            if number == signal.SIGKILL or seconds > HEARTBEAT_TIMEOUT_S / 2:
                await self._until_replaced(gateway, worker)
        return f"{number.name} to a worker of {gateway.name}" + (f" for {seconds:.1f} s" if seconds else "")

    async def _until_replaced(self, gateway: Gateway, worker: psutil.Process) -> None:
        """Wait until a worker has been replaced, or has turned out to serve on."""
        deadline = time.monotonic() + _REPLACED_S
        while time.monotonic() < deadline and not gateway.is_restarting:
            others = [each for each in gateway.processes(WORKER) if each.pid != worker.pid]
            if len(others) >= 2 or (worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE):
                return
            await asyncio.sleep(0.2)

    async def fault_worker_restart(self, rng: random.Random) -> str:
        """Replace the workers one after the other, which no request notices."""
        gateway = self.fleet.gateways[1]
        if gateway.is_restarting or len(gateway.processes(WORKER)) < 2:
            return f"{_SKIPPED}the workers are not all there"
        gateway.program.signal(signal.SIGHUP)
        return f"SIGHUP to {gateway.name}"

    async def fault_gateway_kill(self, rng: random.Random) -> str:
        """Kill a gateway, and start it again at the same ports."""
        gateway = rng.choice(self.fleet.gateways)
        if gateway.is_restarting:
            return f"{_SKIPPED}{gateway.name} starts again already"
        gateway.is_restarting = True
        async with gateway.cut(SETTLING_S):
            await gateway.program.kill()
            await asyncio.sleep(rng.uniform(0, 3))
            await self._start_again(gateway.program)
        gateway.is_restarting = False
        return f"{gateway.name} was killed and started again"

    async def fault_gateway_stop(self, rng: random.Random) -> str:
        """Stop a gateway's process, and let it go on."""
        gateway, seconds = rng.choice(self.fleet.gateways), rng.uniform(0.2, 0.8 * HEARTBEAT_TIMEOUT_S)
        gateway.program.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        gateway.program.signal(signal.SIGCONT)
        return f"{gateway.name} was stopped for {seconds:.1f} s"

    async def fault_redis_stop(self, rng: random.Random) -> str:
        """Stop Redis, and let it go on."""
        redis, seconds = self.fleet.redis, rng.uniform(1, 15)
        assert redis is not None
        with _marked(self.fleet.redis_outages):
            redis.program.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            redis.program.signal(signal.SIGCONT)
        return f"Redis was stopped for {seconds:.1f} s"

    async def fault_redis_kill(self, rng: random.Random) -> str:
        """Kill Redis, and start it again without what it had."""
        redis = self.fleet.redis
        assert redis is not None
        async with redis.program.replacing:
            with _marked(self.fleet.redis_outages):
                await redis.program.kill()
                await asyncio.sleep(rng.uniform(0, 5))
                await redis.start()
        return "Redis was killed and started again, empty"

    async def fault_postgres_stop(self, rng: random.Random) -> str:
        """Stop all processes of Postgres, and let them go on."""
        postgres, seconds = self.fleet.postgres, rng.uniform(1, 10)
        assert postgres is not None
        async with postgres.program.replacing:
            with _marked(*self._postgres_outages()):
                postgres.signal_all(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                postgres.signal_all(signal.SIGCONT)
        return f"Postgres was stopped for {seconds:.1f} s"

    async def fault_postgres_kill(self, rng: random.Random) -> str:
        """Kill all processes of Postgres, and start it again on its files."""
        postgres = self.fleet.postgres
        assert postgres is not None
        async with postgres.program.replacing:
            with _marked(*self._postgres_outages()):
                await postgres.crash()
                await asyncio.sleep(rng.uniform(0, 5))
                await postgres.start()
        return "Postgres was killed and started again"

    def _postgres_outages(self) -> list[list[FaultSpan]]:
        return [each.outages for each in self.fleet.gateways if each.has_postgres]

    async def fault_disk_full(self, rng: random.Random) -> str:
        """Limit the files of a gateway and its workers to a few KiB: longer writes fail."""
        gateway, seconds = rng.choice(self.fleet.gateways), rng.uniform(2, 8)
        if gateway.is_restarting:
            return f"{_SKIPPED}{gateway.name} starts again"
        with _marked(*([] if gateway.has_postgres else [gateway.outages])):
            _limit_files(gateway.program, _SMALL_FILE_BYTES)
            await asyncio.sleep(seconds)
            _limit_files(gateway.program, resource.RLIM_INFINITY)
        return f"the disk of {gateway.name} was full for {seconds:.1f} s"

    async def fault_clock_jump(self, rng: random.Random) -> str:
        """Move the wall clock of a gateway, or of an engine that has registered, by minutes to days, and back."""
        program = rng.choice([each for each in self.fleet.movable() if each.clock is not None])
        offset_s = rng.choice((-1, 1)) * 60 * rng.uniform(1, _LONGEST_JUMP_MIN ** (1 / 3)) ** 3
        seconds = rng.uniform(4, 12)
        assert program.clock is not None
        program.clock.move(offset_s)
        try:
            await asyncio.sleep(seconds)
        finally:
            program.clock.move(0)
        return f"the clock of {program.name} stood {offset_s / 60:+.0f} minutes off for {seconds:.1f} s"

    async def fault_slow_readers(self, rng: random.Random) -> str:
        """Ask for streams and do not read them."""
        gateway, count, seconds = rng.choice(self.fleet.gateways), rng.randint(1, 8), rng.uniform(1, 8)
        await read_slowly(gateway, count, seconds)
        return f"{count} slow readers of {gateway.name} for {seconds:.1f} s"

    async def fault_half_open(self, rng: random.Random) -> str:
        """Open connections and say nothing, or half of a request."""
        gateway, count, seconds = rng.choice(self.fleet.gateways), rng.randint(10, 60), rng.uniform(1, 8)
        await hold_half_open(gateway, count, seconds)
        return f"{count} silent connections to {gateway.name} for {seconds:.1f} s"

    async def fault_garbage(self, rng: random.Random) -> str:
        """Send garbage to the ports of HTTP and gRPC."""
        gateway = rng.choice(self.fleet.gateways)
        await send_garbage(gateway, rng, 12)
        return f"garbage for {gateway.name}"

    async def fault_model_reload(self, rng: random.Random) -> str:
        """Unload a model, and load it again."""
        gateway = rng.choice(self.fleet.gateways)
        await self._control(gateway, f"/v2/repository/models/{ECHO}/unload", {})
        await asyncio.sleep(rng.uniform(0, 2))
        await self._control(gateway, f"/v2/repository/models/{ECHO}/load", {})
        return f"{ECHO} of {gateway.name} was unloaded and loaded"

    async def fault_canary(self, rng: random.Random) -> str:
        """Move the weights of a model's versions from the first to the second."""
        gateway = rng.choice(self.fleet.gateways)
        for share in (95, 50, 5):
            weights = {"weights": {"1": share, "2": 100 - share}}
            await self._control(gateway, f"/v2/repository/models/{ECHO}/routing", weights)
            await asyncio.sleep(rng.uniform(0, 1))
        return f"the weights of {ECHO} of {gateway.name} were moved"

    async def fault_model_process_kill(self, rng: random.Random) -> str:
        """Kill the process of a Python model's instance."""
        gateway = rng.choice(self.fleet.gateways)
        if not (processes := gateway.processes(PYTHON_WORKER)):
            return f"{_SKIPPED}no such process runs"
        _send(rng.choice(processes), signal.SIGKILL)
        return f"SIGKILL to a Python model's process of {gateway.name}"

    async def _control(self, gateway: Gateway, path: str, body: object) -> None:
        """Ask for a change. While its gateway is killed, or the model is loaded, it may fail."""
        with suppress(httpx.HTTPError):
            await self.fleet.client.post(f"{gateway.url}{path}", json=body)

    async def repair(self) -> None:
        """Load what was unloaded when a load failed."""
        for gateway in self.fleet.gateways:
            await self._control(gateway, f"/v2/repository/models/{ECHO}/load", {})
            await self._control(gateway, f"/v2/repository/models/{ECHO}/routing", {"weights": None})

    async def _start_again(self, program: Program) -> None:
        """Start a program, again where it ends at its start: a store that it needs may be away."""
        for attempt in range(_RESTART_ATTEMPTS):
            try:
                await program.start()
                return
            except FleetError as error:
                if attempt == _RESTART_ATTEMPTS - 1:
                    self.errors.append(str(error))
                await program.kill()
                await asyncio.sleep(2)


@contextmanager
def _marked(*places: list[FaultSpan]) -> Iterator[None]:
    """Mark a time in each of these places."""
    interval = FaultSpan(time.time())
    for place in places:
        place.append(interval)
    try:
        yield
    finally:
        interval.ended_at = time.time()


def _send(process: psutil.Process | None, number: signal.Signals) -> None:
    if process is not None:
        with suppress(psutil.Error):
            process.send_signal(number)


def _limit_files(program: Program, most_bytes: int) -> None:
    """Set the longest file that a program's processes may write, those included that it has started meanwhile."""
    for process in program.family():
        with suppress(psutil.Error):
            _, hard = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (hard if most_bytes == resource.RLIM_INFINITY else most_bytes, hard))


_NEEDS = {"redis": ("redis_stop", "redis_kill", "launcher_kill"), "postgres": ("postgres_stop", "postgres_kill")}
_NEEDS["clocks"] = ("clock_jump",)
FAULTS = tuple(name.removeprefix("fault_") for name in vars(Faults) if name.startswith("fault_"))
"""The names of all faults."""


def possible_faults(names: tuple[str, ...], skipped: dict[str, str]) -> tuple[str, ...]:
    """Return the faults for which the fleet has all parts."""
    missing = {name for part in skipped for name in _NEEDS[part]}
    return tuple(name for name in names if name not in missing)
