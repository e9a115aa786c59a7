"""Runs the fleet under faults: it starts, learns its answers, bears faults under traffic, and is checked at the end."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sluice.load.chaos.faults import Faults, possible_faults
from sluice.load.chaos.fleet import FaultSpan, Fleet, FleetError, Gateway, running_fleet
from sluice.load.chaos.ledgers import FLUSH_S, compare_completions, count_excused, read_ledger, tokens_of_counters
from sluice.load.chaos.samples import (
    FleetSample,
    Size,
    Slope,
    find_growth,
    find_leaks,
    find_slopes,
    keep_sampling,
    measure,
    sample_interval_s,
)
from sluice.load.chaos.traffic import Traffic


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """A fault, when it comes, and the seed of what it chooses."""

    at_s: float
    """Seconds from the first fault's earliest moment."""
    name: str
    seed: int


def schedule(seed: int, names: Sequence[str], duration_s: float, mean_gap_s: float) -> Iterator[ScheduledFault]:
    """Yield the faults of a run. Each name comes once before any comes again, in an order of the seed. Pure."""
    rng = random.Random(seed)
    at_s, waiting = 0.0, list[str]()
    while True:
        at_s += rng.uniform(0.5, 1.5) * mean_gap_s
        if at_s >= duration_s:
            return
        if not waiting:
            waiting = rng.sample(names, len(names))
        yield ScheduledFault(at_s, waiting.pop(), rng.getrandbits(32))


SETTLING_S = 150.0
"""Seconds that the fleet may take to be whole and still again after the last fault."""
PLATEAU_S = 10.0
"""Traffic before the first fault, after which memory, threads and descriptors are measured."""
_COUNTED_S = 20.0
"""Seconds that counts of workers and rows of ledgers may take."""
_LOOK_S = 0.5
_STANDSTILL_S = 4.0
"""A turn of the watch that takes longer means that the machine, or all of this fleet, did not run."""
_AFTERMATH_S = 10.0
"""After a standstill all deadlines are over at once: what broke then says nothing."""
_STILL_GAUGES = (
    "sluice_sequences_running",
    "sluice_sequences_waiting",
    "sluice_kv_blocks_used",
    "sluice_kv_blocks_reserved",
    "sluice_open_requests",
    "sluice_ledger_waiting_rows",
)
"""The gauges that are 0 when all is still."""


TokenCounts = tuple[dict[str, float], dict[str, int]]
"""Tokens by the counters and by the ledger."""


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """The settings of a run."""

    minutes: float
    folder: Path
    """The folder of logs, ledgers and models."""
    faults: tuple[str, ...]
    seed: int = 0
    num_clients: int = 12
    mean_gap_s: float = 6.0
    model: Path | None = None
    """A checkpoint; None for the bundled model."""
    num_light: int = 2
    """Clients that ask what costs little, beside the others."""


@dataclass(slots=True)
class ChaosRun:
    """A run and its findings, while it goes on and when it is over."""

    config: ChaosConfig
    traffic: Traffic | None = None
    phase: str = "starting the fleet"
    begun_at: float = field(default_factory=time.time)
    num_faults: dict[str, int] = field(default_factory=dict)
    current_faults: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """The faults and their times, a line each."""
    skipped: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False
    """Whether it went on to its end, with the checks that are made there."""
    violations: list[str] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    before: dict[str, Size] = field(default_factory=dict)
    after: dict[str, Size] = field(default_factory=dict)
    samples: list[FleetSample] = field(default_factory=list)
    """One sample a minute, from the first fault on."""
    slopes: list[Slope] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.trace.append(f"{time.strftime('%H:%M:%S')} {text}")


async def run_chaos(run: ChaosRun) -> None:
    """ChaosRun to the end; what is found stands in `run`. Raises FleetError where the fleet does not start."""
    moves_clocks = "clock_jump" in run.config.faults
    async with running_fleet(run.config.folder, run.config.model, moves_clocks=moves_clocks) as fleet:
        run.skipped = dict(fleet.skipped)
        async with Traffic(fleet, run.config.seed) as traffic:
            run.traffic = traffic
            course = _Course(run, fleet, traffic)
            try:
                await course.follow()
                run.is_complete = True
            finally:
                course.collect()


class _Course:
    """The phases of a run."""

    def __init__(self, run: ChaosRun, fleet: Fleet, traffic: Traffic) -> None:
        self._run = run
        self._config = run.config
        self._fleet = fleet
        self._traffic = traffic
        self._faults = Faults(fleet)

    async def follow(self) -> None:
        """Go through all phases."""
        self._run.phase = "learning the answers"
        await self._fleet.wait_for_documents()
        await self._traffic.learn()
        self._run.phase = "traffic without faults"
        clients = asyncio.create_task(self._traffic.run(self._config.num_clients, self._config.num_light))
        watching = asyncio.create_task(self._watch_standstills())
        sampling = asyncio.create_task(self._sample())
        try:
            await asyncio.sleep(PLATEAU_S)
            self._run.before = measure(self._fleet)
            await self._disturb()
            self._run.phase = "waiting until the fleet is whole"
            await self._until("the fleet is whole", self._find_missing)
            self._traffic.is_stopping = True
            await clients
        finally:  # nobody shall count what breaks as the fleet ends
            await _cancel(clients, watching, sampling)
        self._run.phase = "waiting until all is still"
        await self._until("nothing runs, waits or is reserved", self._find_open)
        await self._reckon()

    def collect(self) -> None:
        """Take in what became of the requests, also of a run that is interrupted."""
        self._run.violations += self._traffic.tally.violations() + self._faults.errors

    async def _sample(self) -> None:
        await asyncio.sleep(PLATEAU_S)
        interval_s = sample_interval_s(self._config.minutes * 60)
        await keep_sampling(self._fleet, self._traffic.tally, self._run.samples, interval_s)

    async def _watch_standstills(self) -> None:
        """Record the spans in which the machine stood still, which excuse what happened in them."""
        while True:
            begun_at = time.time()
            await asyncio.sleep(_LOOK_S)
            if (seconds := time.time() - begun_at) > _STANDSTILL_S:
                self._fleet.standstills.append(FaultSpan(begun_at, time.time() + _AFTERMATH_S))
                self._run.note(f"the machine stood still for {seconds:.1f} s")

    async def _disturb(self) -> None:
        """Run the faults at their times; they may overlap."""
        self._run.phase = "faults"
        names = possible_faults(self._config.faults, self._run.skipped)
        duration_s, begun = self._config.minutes * 60, time.monotonic()
        async with asyncio.TaskGroup() as group:
            for each in schedule(self._config.seed, names, duration_s, self._config.mean_gap_s):
                await asyncio.sleep(max(0.0, begun + each.at_s - time.monotonic()))
                group.create_task(self._do(each.name, each.seed))
            await asyncio.sleep(max(0.0, begun + duration_s - time.monotonic()))
        await self._faults.repair()

    async def _do(self, name: str, seed: int) -> None:
        self._run.current_faults.append(name)
        self._run.note(f"begins: {name}")
        try:
            done = await self._faults.run(name, seed)
        except (FleetError, httpx.HTTPError, OSError) as error:
            done = f"{name}: {error!r}"
            self._faults.errors.append(done)
        finally:
            self._run.current_faults.remove(name)
        self._run.num_faults[name] = self._run.num_faults.get(name, 0) + 1
        self._run.note(f"over: {done}")

    async def _until(
        self, what: str, find_missing: Callable[[], Awaitable[str]], patience_s: float = SETTLING_S
    ) -> None:
        """Wait until nothing is missing; what still is after `patience_s` is a violation."""
        begun = time.monotonic()
        missing = await find_missing()
        while missing and time.monotonic() - begun < patience_s:
            await asyncio.sleep(_LOOK_S)
            missing = await find_missing()
        if missing:
            self._run.violations.append(f"not within {patience_s:.0f} s: {what}: {missing}")
        self._run.checks[what] = missing or f"after {time.monotonic() - begun:.1f} s"

    async def _find_missing(self) -> str:
        answers = {each.name: await self._fleet.health(each) for each in self._fleet.gateways}
        return "; ".join(f"/health of {name}: {said}" for name, said in answers.items() if said != {"status": "ok"})

    async def _find_open(self) -> str:
        found = [f"{each.name}: {said}" for each in self._fleet.gateways if (said := await self._find_open_at(each))]
        return "; ".join(found)

    async def _find_open_at(self, gateway: Gateway) -> str:
        try:
            metrics = await self._fleet.metrics(gateway)
        except httpx.HTTPError as error:
            return f"no metrics: {error!r}"
        return find_open(metrics)

    async def _reckon(self) -> None:
        """Compare sizes with those before the first fault, and the ledgers with counters and clients."""
        self._run.phase = "comparing ledgers, counters and sizes"
        self._run.checks["standstills of the machine"] = str(len(self._fleet.standstills))
        before = [await self._read_tokens(each) for each in self._fleet.gateways]
        await self._traffic.ask_each_kind()
        await self._until("nothing is open after calm requests", self._find_open)
        for gateway, earlier in zip(self._fleet.gateways, before, strict=True):
            await self._compare_tokens(gateway, earlier)
            await self._compare_rows(gateway)
        self._run.slopes = find_slopes(self._run.samples)
        self._run.violations += find_leaks(self._run.slopes)
        await self._until("sizes are within their bounds", self._find_growth)
        self._run.after = measure(self._fleet)

    async def _read_tokens(self, gateway: Gateway) -> TokenCounts:
        """Return the tokens by counters and by ledger. All rows are written by now."""
        await asyncio.sleep(FLUSH_S)
        counters = tokens_of_counters(await self._fleet.metrics(gateway))
        return counters, dict((await read_ledger(self._fleet, gateway)).tokens)

    async def _compare_tokens(self, gateway: Gateway, earlier: TokenCounts) -> None:
        """Require that the ledger and the counters have grown by the same number of tokens."""

        async def find_difference() -> str:
            counters, rows = await self._read_tokens(gateway)
            growths = {name: (rows[name] - earlier[1][name], counters[name] - earlier[0][name]) for name in counters}
            return "; ".join(
                f"{name}: {written} in the ledger, {counted:.0f} in the counters"
                for name, (written, counted) in growths.items()
                if written != counted
            )

        await self._until(f"ledger and counters of {gateway.name} have the same tokens", find_difference, _COUNTED_S)

    async def _compare_rows(self, gateway: Gateway) -> None:
        ledger = await read_ledger(self._fleet, gateway)
        completions = self._traffic.completions
        self._run.violations += compare_completions(gateway, ledger, completions)
        excused = count_excused(gateway, ledger, completions)
        self._run.checks[f"rows of {gateway.name}"] = f"{ledger.num_rows}, {excused} lost to kills"

    async def _find_growth(self) -> str:
        return "; ".join(find_growth(self._run.before, measure(self._fleet)))


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.wait(tasks)


def find_open(metrics: Mapping[str, float]) -> str:
    """Return the requests and resources that a gateway's metrics show as open. Pure."""
    found = [f"{key} {value:g}" for key, value in metrics.items() if value and key.partition("{")[0] in _STILL_GAUGES]
    for key, total in metrics.items():
        if key.startswith("sluice_kv_blocks{") and (free := metrics[key.replace("blocks", "blocks_free", 1)]) != total:
            found.append(f"{free:g} of {total:g} KV blocks are free")
    return ", ".join(found)


__all__ = ["ChaosConfig", "ChaosRun", "FleetError", "run_chaos"]
