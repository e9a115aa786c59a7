import asyncio
import gc
import random
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.instance import Instance, Placement
from sluice.serving.job import InferJob
from sluice.serving.model import infer_one
from sluice.serving.request import InferResponse
from sluice.serving.statistics import FailureReason
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.parts import CONFIG, AtOnceInstance, Client, HeldInstance, Script, model_of, request, turns
from tests.waiting import until

DYNAMIC = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: %d }"
SOON = DYNAMIC % 200
NEVER = DYNAMIC % 60_000_000


class QuickInstance(HeldInstance):
    """Is done with a request before others are read."""

    @property
    def wants_first(self) -> bool:
        return True


ANY = "dynamic_batching { }"
TWO = "dynamic_batching { preferred_batch_size: [ 2 ] }"
LEVELS = "dynamic_batching { preferred_batch_size: 1 priority_levels: 2 default_priority_level: 2 }"
ORDERED = "dynamic_batching { preferred_batch_size: 1 preserve_ordering: true }"
DELAYED = """dynamic_batching { preferred_batch_size: 1 default_queue_policy {
    timeout_action: DELAY default_timeout_microseconds: 60000000 allow_timeout_override: true } }"""
BATCHES: dict[str, tuple[str, int | type[HeldInstance], str, str]] = {
    "a free instance runs a request at once": ("", 1, "a", "a"),
    "others wait in order, each a batch of its own": ("", 1, "a b c .0 .0 .0", "a b c"),
    "all instances work": ("", 2, "a b c .1", "a; b c"),
    "one that is not ready is passed over": ("", 2, "x0 a b .1", "; a b"),
    "where none is ready one gets it all the same": ("", 1, "x0 a", "a"),
    "requests wait for others of their turn": (ANY, 1, "a b c", ""),
    "requests of one turn share a batch": (ANY, 1, "a b c |", "abc"),
    "a preferred batch goes before the delay is over": (NEVER, 1, "a b c d e | .0 |", "abcd"),
    "a batch fills while the instance is busy": (ANY, 1, "a | b c | d e f g h i j k .0", "a bcdefghi"),
    "different shapes do not share a batch": (ANY, 1, "a/2 b/2 c/3 d/2 | .0 .0 .0", "ab c d"),
    "higher priorities overtake": (LEVELS, 1, "a | b c^1 .0 .0", "a c b"),
    "an instance that wants the first request gets it alone": (ANY, QuickInstance, "a b c .0 |", "a bc"),
    "a size that was chosen holds for it too": (TWO, QuickInstance, "a", ""),
    "a delay that was chosen holds for it too": (NEVER, QuickInstance, "a", ""),
    "what waits for too long may go behind the others": (DELAYED, 1, "a | b@1 c .0 .0", "a c b"),
    "a running request that is cancelled is not heard of": ("", 1, "a -a .0", "a => "),
    "a response waits for those of earlier requests": (ORDERED, 2, "a b | .1", "a; b => "),
    "and comes after them": (ORDERED, 2, "a b | .1 .0", "a; b => a b"),
}


@pytest.mark.parametrize("case", BATCHES)
async def test_which_requests_run_together_where_and_when(case: str) -> None:
    """After `=>` stands who was answered, in this order."""
    extra, given, words, expected = BATCHES[case]
    instances = [HeldInstance(str(number)) for number in range(given)] if isinstance(given, int) else [given()]
    client = Client(model_of(extra, *instances))
    found = await Script(instances, client.submit_word).play(words)
    assert found + f" => {' '.join(client.answered)}" * ("=>" in expected) == expected
    assert client.model.is_ready == any(each.is_up for each in instances)
    await client.model.close()


class TestWithoutDynamicBatching:
    async def test_those_that_wait_are_counted_and_answered_in_order(self) -> None:
        instance = HeldInstance()
        client = Client(model_of("", instance))
        for name in "abc":
            client.submit(name)
        assert client.model.statistics.count_pending() == 2
        for _ in range(3):
            instance.finish()
        assert client.answered == ["a", "b", "c"]
        assert client.model.num_in_flight == 0

    async def test_a_long_queue_before_an_instance_that_answers_at_once_does_not_recurse(self) -> None:
        client = Client(model_of("", AtOnceInstance()))
        left = 2000

        def again(response: InferResponse) -> None:
            nonlocal left
            left -= 1
            if left:
                client.model.submit(request("again"), again)

        client.model.submit(request("first"), again)
        assert left == 0


class TestDynamicBatching:
    @pytest.mark.parametrize("delay_us", [200, 20_000])
    async def test_less_goes_when_the_delay_is_over(self, delay_us: int) -> None:
        instance = HeldInstance()
        client = Client(model_of(DYNAMIC % delay_us, instance))
        begun = perf_counter()
        client.submit("a")
        client.submit("b", rows=2)
        await until(lambda: instance.is_running)
        assert perf_counter() - begun >= delay_us / 1e6
        assert instance.ids == [["a", "b"]]
        assert [job.executed_batch_size for job in instance.batches[0]] == [3, 3]

    async def test_ragged_inputs_do(self) -> None:
        instance = HeldInstance()
        base = CONFIG.replace("dims: [ -1 ] }\noutput", "dims: [ -1 ] allow_ragged_batch: true }\noutput")
        client = Client(model_of("dynamic_batching { }", instance, base=base))
        client.submit("a", width=2)
        client.submit("b", width=3)
        await turns()
        assert instance.ids == [["a", "b"]]

    async def test_optional_inputs_must_be_the_same(self) -> None:
        instance = HeldInstance()
        base = CONFIG + 'input { name: "O" data_type: TYPE_INT32 dims: [ 1 ] optional: true }'
        client = Client(model_of("dynamic_batching { }", instance, base=base))
        client.submit("a")
        with_option = request("b")
        with_option.inputs["O"] = Tensor.of("O", np.zeros((1, 1), np.int32))
        client.model.submit(with_option, client.receive)
        client.submit("c")
        await turns()
        for _ in range(3):
            instance.finish()
        assert instance.ids == [["a"], ["b"], ["c"]]


class TestQueuePolicies:
    async def test_a_full_queue_refuses_and_counts(self) -> None:
        instance = HeldInstance()
        client = Client(model_of("dynamic_batching { default_queue_policy { max_queue_size: 1 } }", instance))
        client.submit("a")
        await turns()
        client.submit("b")
        with pytest.raises(SluiceError, match="Exceeds maximum queue size"):
            client.submit("c")
        assert client.model.statistics.failures[FailureReason.REJECTED] == 1
        assert client.model.num_in_flight == 2
        instance.finish()
        instance.finish()

    async def test_a_request_that_waits_too_long_is_refused_while_the_instance_is_busy(self) -> None:
        instance = HeldInstance()
        timeout = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 } }"
        client = Client(model_of(timeout, instance))
        client.submit("a")
        await turns()
        client.submit("b")
        await until(lambda: "b" in client.errors)
        assert client.errors["b"].code is ErrorCode.UNAVAILABLE
        assert client.errors["b"].message == "Request timeout expired"
        assert client.model.statistics.failures[FailureReason.REJECTED] == 1
        instance.finish()
        assert instance.ids == [["a"]]

    async def test_without_a_batch_dimension_the_queue_is_served_by_the_same_rules(self) -> None:
        instance = HeldInstance()
        base = CONFIG.replace("max_batch_size: 8", "").replace("[ -1 ]", "[ -1, -1 ]")
        policy = "max_queue_size: 2 allow_timeout_override: true"
        levels = "priority_levels: 2 default_priority_level: 2"
        client = Client(
            model_of(f"dynamic_batching {{ {levels} default_queue_policy {{ {policy} }} }}", instance, base=base)
        )
        client.submit("a")
        assert instance.ids == [["a"]]
        client.submit("late", timeout_us=1)
        client.submit("b")
        with pytest.raises(SluiceError, match="Exceeds maximum queue size"):
            client.submit("c")
        client.submit("urgent", priority=1)
        await until(lambda: "late" in client.errors)
        instance.finish()
        instance.finish()
        assert instance.ids == [["a"], ["urgent"], ["b"]]
        instance.finish()


class TestCancellation:
    @pytest.mark.parametrize("extra", ["", SOON])
    async def test_a_queued_request_leaves_at_once(self, extra: str) -> None:
        instance = HeldInstance()
        client = Client(model_of(extra, instance))
        client.submit("a")
        await until(lambda: instance.is_running)
        job = client.submit("b")
        job.cancel()
        assert job.is_finished
        assert job.outcome is not None
        assert job.outcome.code is ErrorCode.CANCELLED
        assert client.model.statistics.count_pending() == 0
        assert client.model.statistics.failures[FailureReason.CANCELED] == 1
        instance.finish()
        assert client.answered == ["a"]
        assert client.model.num_in_flight == 0

    async def test_cancelling_the_task_of_a_call_cancels_the_request(self) -> None:
        instance = HeldInstance()
        model = model_of("", instance)
        first = asyncio.create_task(infer_one(model, request("a")))
        second = asyncio.create_task(infer_one(model, request("b")))
        await turns()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        instance.finish()
        assert (await first).id == "a"
        assert instance.ids == [["a"]]


class TestInstances:
    @pytest.mark.parametrize("extra", ["", "dynamic_batching { preferred_batch_size: 1 }"])
    async def test_it_is_looked_for_until_it_is_back(self, extra: str) -> None:
        class Asked(HeldInstance):
            is_up = False
            num_asked = 0

            @property
            def is_ready(self) -> bool:
                self.num_asked += 1
                return self.is_up

        down, up = Asked(), HeldInstance()
        client = Client(model_of(extra, down, up))
        down.is_up = False
        client.submit("a")
        client.submit("b")
        await until(lambda: up.is_running)
        asked = down.num_asked
        await until(lambda: down.num_asked >= asked + 3)
        down.is_up = True
        await until(lambda: down.is_running)
        assert down.ids == [["b"]]

    async def test_spill_over_runs_only_while_all_others_are_busy(self) -> None:
        cpu = HeldInstance("cpu", Placement("cpu", is_spillover=True))
        gpus = [HeldInstance(name, Placement(name, "GPU", number)) for number, name in enumerate(("one", "two"))]
        client = Client(model_of("", cpu, *gpus))
        for name in "abc":
            client.submit(name)
        assert [each.ids for each in (*gpus, cpu)] == [[["a"]], [["b"]], [["c"]]]
        cpu.finish()
        gpus[1].finish()
        client.submit("d")
        assert gpus[1].ids == [["b"], ["d"]]
        gpus[0].is_up = False
        gpus[0].finish()
        client.submit("e")
        assert cpu.ids == [["c"], ["e"]]

    async def test_a_passive_one_takes_no_requests_and_ends_with_the_model(self) -> None:
        passive = HeldInstance("p", Placement("p", is_passive=True))
        active = HeldInstance("a", Placement("a"))
        client = Client(model_of("", passive, active))
        client.submit("a")
        client.submit("b")
        assert (passive.ids, active.ids) == ([], [["a"]])
        active.is_up = False
        assert not client.model.is_ready
        await client.model.close()
        assert passive.is_closed

    async def test_one_that_raises_fails_its_batch_and_is_free_again(self, caplog: pytest.LogCaptureFixture) -> None:
        class Faulty(AtOnceInstance):
            is_faulty = True

            def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
                if self.is_faulty:
                    raise RuntimeError("a bug")
                super().execute(jobs, done)

        instance = Faulty()
        client = Client(model_of("", instance))
        client.submit("a")
        assert client.errors["a"].code is ErrorCode.INTERNAL
        assert "a bug" not in client.errors["a"].message
        assert "a bug" in caplog.text
        instance.is_faulty = False
        client.submit("b")
        assert client.answered == ["a", "b"]
        assert client.model.statistics.failures[FailureReason.BACKEND] == 1


class TestOrder:
    async def test_who_cancels_or_is_refused_holds_nobody_up(self) -> None:
        one, two = HeldInstance(), HeldInstance()
        client = Client(model_of(ORDERED, one, two))
        with pytest.raises(SluiceError):
            client.submit("refused", rows=99)
        first = client.submit("a")
        client.submit("b")
        await turns()
        two.finish()
        first.cancel()
        assert client.answered == []
        one.finish()
        assert client.answered == ["b"]
        queued = [client.submit(name) for name in "cdef"]
        queued[0].cancel()
        await turns()
        for instance in (one, two, one):
            instance.finish()
        assert client.answered == ["b", "d", "e", "f"]

    async def test_who_waits_for_too_long_hears_of_it_on_time(self) -> None:
        instance = HeldInstance()
        policy = "default_queue_policy { allow_timeout_override: true }"
        client = Client(model_of(f"dynamic_batching {{ preserve_ordering: true {policy} }}", instance))
        client.submit("a")
        await turns()
        client.submit("b", timeout_us=1)
        await until(lambda: "b" in client.errors)
        assert client.answered == ["b"]
        client.submit("c")
        instance.finish()
        instance.finish()
        assert client.answered == ["b", "a", "c"]

    async def test_a_stream_passes_as_it_comes_when_it_is_its_turn(self) -> None:
        one, two = HeldInstance(), HeldInstance()
        client = Client(model_of(ORDERED + "model_transaction_policy { decoupled: true }", one, two))
        first, second = client.submit("a"), client.submit("b")
        await turns()
        piece = Tensor.of("Y", np.zeros((1, 1), np.int32))
        second.respond(InferResponse([piece], is_final=False))
        first.respond(InferResponse([piece], is_final=False))
        assert client.answered == ["a"]
        first.respond(InferResponse([piece]))
        assert client.answered == ["a", "a", "b"]
        second.respond(InferResponse([piece], is_final=False))
        assert client.answered == ["a", "a", "b", "b"]


class TestEnd:
    async def test_unloading_lets_what_is_queued_run(self) -> None:
        instance = HeldInstance()
        client = Client(model_of("", instance))
        client.submit("a")
        client.submit("b")
        unloading = asyncio.create_task(client.model.unload())
        await turns()
        with pytest.raises(SluiceError):
            client.submit("late")
        instance.finish()
        assert not instance.is_closed
        instance.finish()
        await unloading
        assert instance.is_closed
        assert client.answered == ["a", "b"]

    async def test_closing_fails_the_rest(self) -> None:
        instance = HeldInstance()
        client = Client(model_of(SOON, instance))
        client.submit("a")
        await until(lambda: instance.is_running)
        client.submit("b")
        await client.model.close()
        assert client.errors["a"].code is client.errors["b"].code is ErrorCode.UNAVAILABLE
        assert client.model.num_in_flight == 0
        await client.model.close()

    async def test_a_deadline_ends_the_wait_for_what_is_under_way(self) -> None:
        instance = HeldInstance()
        client = Client(model_of("", instance))
        client.submit("a")
        await client.model.unload(timeout_s=0.01)
        assert instance.is_closed
        assert "a" in client.errors


async def test_outputs_get_the_shape_that_the_configuration_promises() -> None:
    base = """
        name: "r" backend: "test" max_batch_size: 8
        input { name: "X" data_type: TYPE_INT32 dims: [ 2, -1 ] reshape { shape: [ -1, 1, 2 ] } }
        output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] reshape { shape: [ -1, 1, 2 ] } }
    """
    instance = AtOnceInstance()
    seen: list[tuple[int, ...]] = []
    model = model_of("", instance, base=base.replace("dims: [ -1 ]", "dims: [ 2, -1 ]"))
    asked = request("a", rows=3)
    asked.inputs["X"] = Tensor.of("X", np.arange(24, dtype=np.int32).reshape(3, 2, 4))
    model.submit(asked, lambda response: seen.append(response.outputs[0].shape))
    assert asked.inputs["X"].shape == (3, 4, 1, 2)
    assert seen == [(3, 2, 4)]


class RandomInstance(Instance):
    """Ends its batches in the loop's later turns, at random, sometimes with the responses first."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.sizes: list[int] = []

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        self.sizes.append(sum(job.request.batch_size for job in jobs))
        self._later(self._random.randrange(4), jobs, done)

    def _later(self, turns_left: int, jobs: list[InferJob], done: Callable[[], None]) -> None:
        if turns_left:
            asyncio.get_running_loop().call_soon(self._later, turns_left - 1, jobs, done)
            return
        for job in jobs:
            job.respond(InferResponse(outputs=[job.request.inputs["X"].renamed("Y")]))
        done()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_ends_exactly_once_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    is_ordered = chance.random() < 0.5
    extra = chance.choice(
        (
            "",
            f"dynamic_batching {{ preserve_ordering: {str(is_ordered).lower()} }}",
            f"dynamic_batching {{ preferred_batch_size: [ 2, 5 ] max_queue_delay_microseconds: 300 "
            f"preserve_ordering: {str(is_ordered).lower()} priority_levels: 2 default_priority_level: 1 "
            "default_queue_policy { max_queue_size: 20 default_timeout_microseconds: 3000 } }",
        )
    )
    instances = [RandomInstance(seed + number) for number in range(chance.choice((1, 3)))]
    model = model_of(extra, *instances)
    client = Client(model)
    cancelled: set[str] = set()
    submitted: list[str] = []
    for number in range(300):
        name = str(number)
        try:
            job = client.submit(name, chance.randint(1, 8), chance.randint(1, 2), chance.randint(0, 2))
        except SluiceError:
            continue
        submitted.append(name)
        if chance.random() < 0.1 and not job.is_finished:
            job.cancel()
            cancelled.add(name)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    await until(lambda: model.num_in_flight == 0)
    assert sorted(client.answered) == sorted(set(submitted) - cancelled)
    if model._order is not None:
        served = [name for name in client.answered if name not in client.errors]
        assert served == sorted(served, key=int)
    assert max(size for instance in instances for size in instance.sizes) <= 8
    infer = model.statistics.infer
    assert infer.success.count + infer.fail.count == 300
    assert model.statistics.count_pending() == 0
    await model.close()


@pytest.mark.parametrize("new_instance", [HeldInstance, AtOnceInstance])
@pytest.mark.parametrize(
    "extra",
    [
        "",
        "dynamic_batching { }",
        "dynamic_batching { preserve_ordering: true }",
        "dynamic_batching { preserve_ordering: true default_queue_policy { default_timeout_microseconds: 1000 } }",
    ],
)
async def test_what_is_over_needs_no_garbage_collector(extra: str, new_instance: Callable[[], Instance]) -> None:
    """Its pauses would make everybody wait: a request that was answered, refused or cancelled goes by itself."""
    instance = new_instance()
    client = Client(model_of(extra, instance))
    client.submit("first")
    await turns()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for number in range(20):
            job = client.submit(str(number))
            if number % 2:
                job.cancel()
        del job
        if "timeout" in extra:
            await until(lambda: client.model.statistics.count_pending() == 0)
        while isinstance(instance, HeldInstance) and instance.is_running:
            instance.finish()
            instance.batches.clear()
            await turns()
        await until(lambda: client.model.num_in_flight == 0)
        gc.collect()
        # What other tests of this process left to their threads may end meanwhile: only batching's own things count.
        assert [each for each in gc.garbage if type(each).__module__.startswith(("serving.", __name__))] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
