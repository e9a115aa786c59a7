"""Whatever clients and processes do: no sequence runs on a state that is not its own, and nothing is left behind."""

import asyncio
import random
from collections.abc import Callable

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from tests.serving.batching.sequences.parts import END, NONE, START, Clients, sequences
from tests.waiting import until

STATE = 'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] }'
STEP = 1000
"""A request's value is its sequence's number for its client, times this, and its own place in the sequence."""


class Strict(Instance):
    """Checks that each request follows the one before it. Ends batches in later turns, and dies now and then."""

    def __init__(self, name: str, chance: random.Random, death_rate: float) -> None:
        self.name = name
        self.num_starts = 1
        self.is_up = True
        self.faults: list[str] = []
        self.num_deaths = 0
        self._chance = chance
        self._death_rate = death_rate
        self._last: dict[int, int] = {}
        """By id: the value of its last request."""

    @property
    def is_ready(self) -> bool:
        return self.is_up

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        if self.is_up:
            self._later(self._chance.randrange(3), lambda: self._run(jobs, done))
        else:
            self._later(2, lambda: self.execute(jobs, done))  # held until it is back

    def _later(self, turns: int, call: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self._later(turns - 1, call) if turns else call())

    def _run(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        if self._chance.random() < self._death_rate:
            self._die(jobs)
        else:
            for job in jobs:
                if job.request.inputs["READY"].array.item():
                    self._check(job)
                x = job.request.inputs["X"]
                job.respond(InferResponse([x.renamed("Y"), x.renamed("T")]))
        done()

    def _die(self, jobs: list[InferJob]) -> None:
        self.is_up = False
        self.num_deaths += 1
        self._last.clear()
        for job in jobs:
            job.fail(SluiceError(ErrorCode.INTERNAL, "not healthy"))
        self._later(4, self._come_back)

    def _come_back(self) -> None:
        self.num_starts += 1
        self.is_up = True

    def _check(self, job: InferJob) -> None:
        inputs = job.request.inputs
        key, value = int(inputs["CORRID"].array.item()), int(inputs["X"].array.item())
        starts = bool(inputs["START"].array.item())
        if not starts and self._last.get(key) != value - 1:
            self.faults.append(f"{key}: {value} follows {self._last.get(key)}")
        self._last[key] = value
        if "S" in inputs and inputs["S"].array.item() != (0 if starts else value - 1):
            self.faults.append(f"{key}: {value} gets the state {inputs['S'].array.item()}")

    async def close(self) -> None:
        pass


class Client:
    """A client of one id: it sends requests ahead, cancels some, and starts again after an error."""

    def __init__(self, clients: Clients, id: int, chance: random.Random) -> None:
        self.clients = clients
        self.id = id
        self.number = 0
        self.place = 0
        self.jobs: dict[str, InferJob] = {}
        self._chance = chance

    def send(self) -> None:
        chance = self._chance
        begins = self.place == 0 or self._has_failed() or chance.random() < 0.05
        if begins:
            self.number, self.place = self.number + 1, 0
        ends = chance.random() < 0.15
        flags = (START if begins else NONE) | (END if ends else NONE)
        name = f"{self.id} {self.number} {self.place}"
        try:
            job = self.clients.submit(name, self.id, flags, value=self.number * STEP + self.place)
        except SluiceError:
            self.place = 0
            return
        self.jobs[name] = job
        self.place = 0 if ends else self.place + 1
        if chance.random() < 0.08:
            job.cancel()
            self.place = 0

    def _has_failed(self) -> bool:
        return any(f"{self.id} {self.number} {place}" in self.clients.errors for place in range(self.place))


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
@pytest.mark.parametrize("state", ["", STATE])
@pytest.mark.parametrize("death_rate", [0.0, 0.03])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
async def test_no_request_runs_on_a_state_that_is_not_its_own(
    strategy: str, state: str, death_rate: float, seed: int
) -> None:
    chance = random.Random(seed)
    instances = [Strict(f"sums_{number}", chance, death_rate) for number in range(2)]
    clients = Clients(sequences(f"{strategy} {state}"), *instances)
    each = [Client(clients, number, chance) for number in range(1, 16)]
    for _ in range(1000):
        chance.choice(each).send()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        if chance.random() < 0.03:
            clients.batcher._live._idle_ns = 0  # whoever is idle now loses its place
            clients.batcher._expire()
            clients.batcher._live._idle_ns = 60 * 10**9
    clients.batcher._live._idle_ns = 1_000_000
    clients.batcher._expire()
    await until(lambda: clients.model.num_in_flight == 0)
    assert [fault for instance in instances for fault in instance.faults] == []
    assert (sum(instance.num_deaths for instance in instances) > 0) == (death_rate > 0)
    wanted = sorted(name for client in each for name, job in client.jobs.items() if not job.is_cancelled)
    assert sorted(clients.answered) == wanted
    await until(lambda: not clients.batcher._live._by_id)
    assert not clients.batcher._members
    for lane in clients.batcher.batchers:
        assert lane.num_pending == 0
        assert len(lane.slots._returned) == lane.slots._num_touched
    assert clients.model.statistics.count_pending() == 0
    await clients.model.close()
