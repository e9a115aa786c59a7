"""Models that keep a state for each row of their batches, as the strategy `direct` promises it."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from sluice.errors import SluiceError
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.sequences.slots import SlotPolicy
from sluice.serving.config.validation import check_structure
from sluice.serving.instance import Instance, Placement, Resource
from sluice.serving.job import InferJob
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import HeldInstance, config_of, turns
from tests.serving.batching.sequences.parts import CONFIG, END, NONE, START, Clients, Computed, control, sequences
from tests.waiting import until


def echoes(jobs: list[InferJob]) -> None:
    for job in jobs:
        job.respond(InferResponse([job.request.inputs["X"].renamed("Y")]))


DIRECT = sequences("direct { }")
NO_CONTROLS = "sequence_batching { direct { } }"


async def run(instance: HeldInstance) -> list[InferJob]:
    """The next batch, which is answered."""
    await until(lambda: instance.is_running)
    batch = instance.batches[-1]
    instance.finish()
    return batch


async def opened(instance: HeldInstance, extra: str = DIRECT, **options: str) -> Clients:
    """Sequences 1, 2 and 3 are under way, in rows 0, 1 and 2."""
    clients = Clients(extra, instance, **options)  # type: ignore[arg-type]
    for number in (1, 2, 3):
        clients.submit(f"start {number}", number, START)
    assert [job.request.correlation_id for job in await run(instance)] == [1, 2, 3]
    return clients


async def test_a_row_without_a_request_has_a_filler_that_is_not_ready() -> None:
    instance = HeldInstance()
    clients = await opened(instance)
    clients.submit("third", 3, value=9)
    first, second, third = await run(instance)
    for filler in (first, second):
        assert [control(filler, each) for each in ("START", "END", "READY", "CORRID")] == [0, 2.0, False, 0]
        assert filler.request.inputs["X"].array.tolist() == [[0]]
    assert third.request.id == "third"
    assert clients.answered[3:] == ["third"]
    assert clients.model.num_in_flight == 0


async def test_fillers_are_there_without_controls_too() -> None:
    instance = HeldInstance()
    clients = await opened(instance, NO_CONTROLS)
    clients.submit("third", 3)
    batch = await run(instance)
    assert [job.request.id for job in batch] == ["", "", "third"]
    assert list(batch[0].request.inputs) == ["X"]


async def test_a_filler_of_text_ids_has_none() -> None:
    instance = HeldInstance()
    clients = await opened(instance, sequences("direct { }", id="STRING"))
    clients.submit("second", 2)
    filler, _ = await run(instance)
    assert control(filler, "CORRID") == b""


async def test_statistics_count_requests_and_the_rows_that_ran() -> None:
    instance = HeldInstance()
    clients = await opened(instance)
    clients.submit("third", 3)
    await run(instance)
    statistics = clients.model.statistics
    assert (statistics.inference_count, statistics.execution_count) == (4, 2)
    assert statistics.infer.success.count == 4
    assert statistics.batches[3].compute_infer.count == 2


async def test_spill_over_comes_after_all_other_places() -> None:
    gpu, cpu = HeldInstance("gpu"), HeldInstance("cpu")
    cpu.placement = Placement("cpu", is_spillover=True)
    clients = Clients(DIRECT, cpu, gpu)
    for number in range(1, 6):
        clients.submit(f"{number}", number, START)
    await turns()
    assert (gpu.ids, cpu.ids) == ([["1", "2", "3", "4"]], [["5"]])


async def test_instances_that_share_a_resource_take_turns() -> None:
    one, two = HeldInstance("one"), HeldInstance("two")
    for instance in (one, two):
        instance.placement = Placement(instance.name, resources=(Resource("R", 1),))
    clients = Clients(DIRECT, one, two, limiter=RateLimiter())
    clients.model.claim_resources()
    for number in (1, 2):
        clients.submit(f"{number}", number, START)
    await turns()
    assert (one.ids, two.ids) == ([["1"]], [])
    one.finish()
    await until(lambda: two.is_running)
    clients.submit("more", 1)
    await turns()
    assert len(one.batches) == 1
    two.finish()
    assert [job.request.id for job in await run(one)] == ["more"]
    await clients.model.close()


async def test_a_warm_up_runs_on_every_instance_and_opens_no_sequence() -> None:
    one, two = Computed(echoes), Computed(echoes)
    clients = Clients(DIRECT, one, two)
    await clients.model.warm_up(InferRequest({"X": Tensor.of("X", np.ones((1, 1), np.int32))}))
    assert [len(batch) for each in (one, two) for batch in each.batches] == [1, 1]
    assert "START" in clients.refusal(1)


async def test_what_cannot_be_stacked_runs_in_a_batch_of_its_own_and_in_its_row() -> None:
    instance = HeldInstance()
    clients = await opened(instance, base=CONFIG.replace("dims: [ 1 ]", "dims: [ -1 ]"))
    clients.submit("wide", 1, width=2)
    clients.submit("also wide", 3, width=2)
    clients.submit("narrow", 2)
    assert [job.request.id for job in await run(instance)] == ["wide", "", "also wide"]
    assert [job.request.inputs["X"].shape for job in instance.batches[-1]] == [(1, 2)] * 3
    assert [job.request.id for job in await run(instance)] == ["", "narrow"]


async def test_without_a_batch_dimension_there_is_one_row() -> None:
    instance = HeldInstance()
    clients = Clients(NO_CONTROLS, instance, base=CONFIG.replace("max_batch_size: 4", ""))
    clients.submit("a", 1, START | END)
    clients.submit("b", 2, START | END)
    assert [job.request.id for job in await run(instance)] == ["a"]
    assert [job.request.id for job in await run(instance)] == ["b"]


@pytest.mark.parametrize(
    ("policy", "num_ready", "expected"),
    [
        (SlotPolicy(4), 1, 0),
        (SlotPolicy(4, delay_ns=100), 1, 0),
        (SlotPolicy(4, minimum_utilization=1.0), 1, 0),
        (SlotPolicy(4, 100, 0.5), 1, 1100),
        (SlotPolicy(4, 100, 0.5), 2, 0),
    ],
)
def test_a_batch_is_due(policy: SlotPolicy, num_ready: int, expected: int) -> None:
    assert policy.due_ns(num_ready, 1000) == expected


@pytest.mark.parametrize("utilization", ["-0.1", "1.5"])
def test_a_utilization_that_cannot_be_is_refused(utilization: str) -> None:
    config = config_of(f"sequence_batching {{ direct {{ minimum_slot_utilization: {utilization} }} }}", CONFIG)
    with pytest.raises(SluiceError, match=r"minimum slot utilization must be in range \(0.0, 1.0\] for sums"):
        check_structure(config)


async def test_a_batch_waits_until_enough_rows_have_a_request() -> None:
    instance = HeldInstance()
    clients = Clients(
        "sequence_batching { direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 0.75 } }",
        instance,
    )
    clients.submit("a", 1, START)
    clients.submit("b", 2, START)
    await turns()
    assert not instance.is_running
    assert clients.model.statistics.count_pending() == 2
    clients.submit("c", 3, START)
    assert len(await run(instance)) == 3


async def test_a_batch_waits_no_longer_than_its_delay() -> None:
    instance = HeldInstance()
    clients = Clients(
        "sequence_batching { direct { max_queue_delay_microseconds: 2000 minimum_slot_utilization: 1.0 } }", instance
    )
    clients.submit("a", 1, START)
    await turns()
    assert not instance.is_running
    assert len(await run(instance)) == 1


async def test_the_next_requests_of_sequences_that_were_answered_together_run_together() -> None:
    class DoneFirst(HeldInstance):
        def finish(self) -> None:
            assert self._running is not None
            jobs, done = self._running
            self._running = None
            done()
            for job in jobs:
                job.respond(InferResponse([job.request.inputs["X"].renamed("Y")]))

    instance = DoneFirst()
    clients = await opened(instance)
    for turn in range(2):
        for number in (1, 2, 3):
            clients.submit(f"{turn} {number}", number)
    for _ in range(2):
        assert all(job.request.id for job in await run(instance))
    assert [len(batch) for batch in instance.batches] == [3, 3, 3]


class RowSums(Instance):
    """Keeps a sum for each row, and knows of sequences only where they begin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sums = [0] * 4

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        for row, job in enumerate(jobs):
            inputs = job.request.inputs
            if inputs["READY"].array.item():
                before = 0 if inputs["START"].array.item() else self._sums[row]
                self._sums[row] = before + int(inputs["X"].array.item())
            job.respond(InferResponse([Tensor.of("Y", np.array([[self._sums[row]]], np.int32))]))
        done()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(4))
async def test_every_sequence_keeps_its_row(seed: int) -> None:
    chance = random.Random(seed)
    clients = Clients(DIRECT, RowSums("one"), RowSums("two"))
    left = {number: chance.randint(1, 12) for number in range(1, 41)}
    sums = dict.fromkeys(left, 0)
    expected: dict[str, int] = {}
    started: set[int] = set()
    while left:
        number, value = chance.choice(list(left)), chance.randint(-50, 50)
        left[number] -= 1
        flags = NONE if number in started else START
        started.add(number)
        if not left[number]:
            flags |= END
            del left[number]
        sums[number] += value
        name = f"{number}: {sums[number]} at {len(expected)}"
        expected[name] = sums[number]
        clients.submit(name, number, flags, value=value)
        if chance.random() < 0.4:
            await turns(1)
    await until(lambda: clients.model.num_in_flight == 0)
    assert {name: clients.value(name) for name in expected} == expected
    assert clients.model.statistics.inference_count == len(expected)
    await clients.model.close()
