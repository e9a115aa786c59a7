"""Measures points of a language model in simulated time, by costs of steps that are calibrated on servers."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from sluice.engine.config import SchedulerPolicy
from sluice.engine.fleet.router import RouterSettings, RoutingPolicy
from sluice.engine.simulation.fleet import FleetConfig, FleetRun, simulate
from sluice.engine.simulation.profile import ReplicaProfile, read_profile
from sluice.engine.simulation.scaling import scale_costs, scaled_profile
from sluice.engine.simulation.traces import TracedRequest
from sluice.errors import SluiceError
from sluice.load.apis import Prompt
from sluice.load.calibrate import OUTPUT, calibrate
from sluice.load.config import RequestPace
from sluice.load.run import RunError
from sluice.load.workload import PromptSource, arrival_offsets, planned_requests, prompt_source
from sluice.tuning.driving import CONCURRENCY, Drive
from sluice.tuning.errors import TrialFailedError, TuneError
from sluice.tuning.figures import Figures, figures_of_simulation
from sluice.tuning.language_model import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    REPLICAS,
    EngineLimits,
    LanguageModelSubject,
    read_limits,
)
from sluice.tuning.scaling import CostScale
from sluice.tuning.server import TrialServer, running_server
from sluice.tuning.space import Point, describe
from sluice.tuning.trials import write_json

SIMULATED = frozenset({MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, REPLICAS, "num-blocks", "scheduler-policy", "router"})
"""Settings that the simulator knows. Each combination of others is calibrated, as they change what a step costs."""
LARGEST_CROWD, LONGEST_PROMPT = 32, 1024
_LEAST_REQUESTS, _REQUESTS_OF_CLIENT = 200, 10
_COSTS_FOLDER = "costs"


class Numbers(PromptSource):
    """Numbers prompts: a simulation needs their lengths and their common starts alone. They are made all the same, so
    that what is drawn afterwards is what the load tool draws."""

    def __init__(self, source: PromptSource) -> None:
        self.exactness = source.exactness
        self._source = source
        self._count = 0

    def make(self, rng: np.random.Generator, num_tokens: int) -> Prompt:
        """Return the number of the prompt or of the start, in the order of the calls."""
        self._source.make(rng, num_tokens)
        self._count += 1
        return [self._count]


@dataclass(slots=True)
class Simulator:
    """Measures points of a language model in the simulator. `costs` is the file of a calibration made before."""

    subject: LanguageModelSubject
    drive: Drive
    folder: Path
    report: Callable[[str], None]
    costs: Path | None = None
    scale: CostScale | None = None
    """The factors of all costs, by load; None before servers have been measured."""
    _profiles: dict[str, ReplicaProfile] = field(default_factory=dict)

    async def measure(self, point: Point) -> Figures:
        """Simulate a point. Raises TrialFailedError where a request can never fit."""
        profile = await self._profile(point)
        if self.scale is not None:
            profile = scaled_profile(profile, self.scale.at(point[self.drive.load_name]))
        run = await asyncio.to_thread(self._simulate, point, profile)
        figures = figures_of_simulation(run, self.drive.slo)
        if not figures:
            raise TrialFailedError("a request and its answer can never fit into the KV cache or --max-model-len")
        return figures

    async def factor(self, point: Point, tpot_s: float) -> float:
        """Return the factor of all calibrated costs by which a point has a mean TPOT that was measured. Raises
        SluiceError INVALID where there is none."""
        requests, config, concurrency = self._load(point, await self._profile(point))
        factor, _ = await asyncio.to_thread(scale_costs, requests, config, tpot_s, concurrency)
        return factor

    async def prepare(self, server: TrialServer) -> None:
        """Calibrate the default settings, on a server that has them."""
        limits = self.subject.limits
        assert limits is not None, "the subject has learnt from the server"
        self._refuse_replicas(limits)
        if self.costs is not None:
            try:
                self._profiles[""] = _limited(read_profile(self.costs), limits)
            except SluiceError as error:
                raise TuneError(f"--costs: {error.message}") from None
        elif not self._read(""):
            await self._calibrate("", server, limits)

    def _refuse_replicas(self, limits: EngineLimits) -> None:
        """Raise TuneError for replicas whose steps take longer the more there are, or that cannot be calibrated."""
        is_searched = REPLICAS in {each.name for each in self.subject.space.settings}
        if limits.chooses_chunk and is_searched:
            raise TuneError("--search replicas: on the CPU they share the cores, which cannot be simulated; add --live")
        if self.subject.given(REPLICAS) not in (None, "1"):
            raise TuneError("--replicas after --: costs of steps are calibrated on one engine; add --live")

    # -- profiles

    async def _profile(self, point: Point) -> ReplicaProfile:
        others = {name: value for name, value in self.subject.space.changed(point).items() if name not in SIMULATED}
        key = describe(others) if others else ""
        if key not in self._profiles and not self._read(key):
            space = self.subject.space
            alone = space.default_point(space.load.values[0]) | others
            arguments = self.subject.arguments(alone, self.folder)
            async with running_server(arguments, self.folder / "logs" / f"costs-{_file_name(key)}.log") as server:
                await self._calibrate(key, server, await read_limits(server))
        return self._profiles[key]

    def _read(self, key: str) -> bool:
        path = self.folder / _COSTS_FOLDER / f"{_file_name(key)}.json"
        if not path.exists():
            return False
        self._profiles[key] = read_profile(path)
        return True

    async def _calibrate(self, key: str, server: TrialServer, limits: EngineLimits) -> None:
        """Calibrate, and keep the profile. Raises TrialFailedError where a request fails."""
        drive, what = self.drive, key or "the default settings"
        longest = min(max(drive.workload.prompt_tokens.high, 64), limits.max_model_len - OUTPUT, LONGEST_PROMPT)
        most = min(self._largest_crowd(), limits.max_num_seqs)
        config = drive.config(server.url, 1)
        config = replace(config, workload=replace(config.workload, prefix_tokens=0))
        try:
            found = await calibrate(config, longest, most, lambda line: self.report(f"costs of {what}: {line}"))
        except RunError as error:
            raise TrialFailedError(f"the costs of steps cannot be calibrated: {error}") from None
        profile = msgspec.json.decode(found.to_json(), type=ReplicaProfile)
        self._profiles[key] = _limited(profile, limits)
        folder = self.folder / _COSTS_FOLDER
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{_file_name(key)}.json", self._profiles[key])

    def _largest_crowd(self) -> int:
        loads = [int(load) for load in self.subject.load.values]
        return min(max(loads), LARGEST_CROWD) if self.drive.load_name == CONCURRENCY else LARGEST_CROWD

    # -- simulation

    def _simulate(self, point: Point, profile: ReplicaProfile) -> FleetRun:
        requests, config, concurrency = self._load(point, profile)
        return simulate(requests, config, concurrency=concurrency)

    def _load(self, point: Point, profile: ReplicaProfile) -> tuple[list[TracedRequest], FleetConfig, int | None]:
        """Return the requests of a point, the fleet that serves them, and the clients that send them, None for
        requests that come at their own times."""
        load = point[self.drive.load_name]
        router = RouterSettings(policy=RoutingPolicy(self._setting(point, "router") or RoutingPolicy.PREFIX))
        policy = SchedulerPolicy(self._setting(point, "scheduler-policy") or SchedulerPolicy.GUARANTEED_NO_EVICT)
        try:
            config = FleetConfig(_with_settings(profile, point), int(point.get(REPLICAS, 1)), router, policy)
        except ValueError as error:
            raise TrialFailedError(str(error)) from None
        if self.drive.load_name == CONCURRENCY:
            clients = int(load)
            return list(islice(self._requests(), max(_LEAST_REQUESTS, _REQUESTS_OF_CLIENT * clients))), config, clients
        return list(self._timed(self.drive.pace(load))), config, None

    def _setting(self, point: Point, name: str) -> str | None:
        """Return a setting that is searched, or that is the same in every trial; None for the default."""
        return str(point[name]) if name in point else self.subject.given(name)

    def _requests(self) -> Iterator[TracedRequest]:
        """Yield the requests of the load tool, without end."""
        workload = self.drive.workload
        for planned in planned_requests(workload, Numbers(prompt_source(self.drive.api, workload))):
            assert isinstance(planned.prompt, list), "Numbers makes lists"
            start = ((f"start {planned.prompt[0]}", workload.prefix_tokens),) if workload.prefix_tokens else ()
            yield TracedRequest(0.0, planned.prompt_tokens, planned.output_tokens, start)

    def _timed(self, pace: RequestPace) -> Iterator[TracedRequest]:
        assert pace.request_rate is not None, "an open loop has a rate"
        end_s = max(self.drive.duration_s, _LEAST_REQUESTS / pace.request_rate)
        offsets = arrival_offsets(replace(pace, duration_s=end_s), self.drive.workload.seed)
        for offset, request in zip(offsets, self._requests(), strict=False):
            if offset >= end_s:
                return
            yield request._replace(at_s=offset)


def _limited(profile: ReplicaProfile, limits: EngineLimits) -> ReplicaProfile:
    """Return a profile with the limits of an engine that runs."""
    return msgspec.structs.replace(
        profile,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        chooses_chunk=limits.chooses_chunk,
    )


def _with_settings(profile: ReplicaProfile, point: Point) -> ReplicaProfile:
    """Return a profile with the settings of a point. Raises ValueError where they contradict each other."""
    changed: dict[str, int | bool] = {}
    seqs, tokens, blocks = (point.get(name) for name in (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, "num-blocks"))
    if isinstance(seqs, int):
        changed["max_num_seqs"] = seqs
        changed["max_num_batched_tokens"] = max(profile.max_num_batched_tokens, seqs)
    if isinstance(tokens, int):
        changed |= {"max_num_batched_tokens": tokens, "chooses_chunk": False}
    if isinstance(blocks, int):
        changed["num_blocks"] = blocks
    return msgspec.structs.replace(profile, **changed)


def _file_name(key: str) -> str:
    return re.sub(r"[^\w.-]+", "_", key) or "default"
