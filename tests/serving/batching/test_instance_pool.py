"""Models whose instances share what the rate limiter has."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from sluice.serving.backend import ModelLookup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.instance import Instance, Placement, Resource
from sluice.serving.spec import ModelSource
from tests.serving.batching.parts import AtOnceInstance, Client, HeldInstance, config_of, request, turns
from tests.serving.batching.test_scheduled_model import RandomInstance
from tests.serving.repository.parts import context_for
from tests.waiting import until

ONE = (Resource("R", 1),)


def place(name: str = "i", resources: tuple[Resource, ...] = ONE, priority: int = 0, **more: object) -> Placement:
    return Placement(name, resources=resources, priority=priority, **more)  # type: ignore[arg-type]


def client_of(limiter: RateLimiter, *instances: Instance, extra: str = "") -> Client:
    """Return a client of a rate-limited model."""
    context = replace(context_for(cast(ModelLookup, None)), rate_limiter=limiter)
    source = ModelSource(Path("/models/echo"), 1, config_of(extra))
    model = ScheduledModel(source, instances, context=context)
    model.claim_resources()
    return Client(model)


@pytest.mark.parametrize("extra", ["", "dynamic_batching { preferred_batch_size: 1 }"])
async def test_models_run_in_turns_where_there_is_enough_for_one(extra: str) -> None:
    limiter = RateLimiter()
    one, two = HeldInstance("one", place()), HeldInstance("two", place())
    clients = [client_of(limiter, each, extra=extra) for each in (one, two)]
    for client in clients:
        for name in "ab":
            client.submit(name)
    await turns()
    assert (one.ids, two.ids) == ([["a"]], [])
    one.finish()
    assert two.ids == [["a"]]
    assert not one.is_running
    two.finish()
    assert one.is_running and not two.is_running
    one.finish()
    two.finish()
    assert one.ids == two.ids == [["a"], ["b"]]
    for client in clients:
        await client.model.close()


async def test_a_batch_grows_while_it_waits_for_resources() -> None:
    limiter = RateLimiter()
    other, instance = HeldInstance("other", place()), HeldInstance("i", place())
    busy, client = client_of(limiter, other), client_of(limiter, instance, extra="dynamic_batching { }")
    busy.submit("x")
    for name in "abc":
        client.submit(name)
        await turns()
    assert instance.ids == []
    other.finish()
    assert instance.ids == [["a", "b", "c"]]
    instance.finish()


async def test_who_does_not_want_it_any_more_holds_nobody_up() -> None:
    limiter = RateLimiter({("R", None): 2})
    small = HeldInstance("small", place())
    large = HeldInstance("large", place(resources=(Resource("R", 2),)))
    third = HeldInstance("third", place())
    busy, leaving, waiting = (client_of(limiter, each) for each in (small, large, third))
    busy.submit("a")
    job = leaving.submit("a")
    waiting.submit("a")
    assert not large.is_running and not third.is_running
    job.cancel()
    assert third.is_running
    small.finish()
    third.finish()
    leaving.submit("b")
    assert large.is_running
    large.finish()


async def test_an_instance_without_resources_and_a_model_without_any_run_at_once() -> None:
    limiter = RateLimiter()
    limited, free = HeldInstance("limited", place()), HeldInstance("free", place(resources=()))
    busy, client = client_of(limiter, HeldInstance("b", place())), client_of(limiter, limited, free)
    busy.submit("x")
    client.submit("a")
    client.submit("b")
    assert (limited.ids, free.ids) == ([], [["a"]])


async def test_devices_do_not_wait_for_each_other() -> None:
    limiter = RateLimiter()
    gpus = [HeldInstance(str(gpu), place(gpu=gpu, kind="GPU")) for gpu in (0, 1)]
    spill = HeldInstance("cpu", place(resources=(), is_spillover=True))
    busy = client_of(limiter, HeldInstance("busy", place(gpu=0)))
    busy.submit("x")
    client = client_of(limiter, *gpus, spill)
    for name in "ab":
        client.submit(name)
    assert [each.ids for each in (*gpus, spill)] == [[], [["a"]], [["b"]]]


async def test_places_with_one_worker_take_what_the_worker_needs_once() -> None:
    limiter = RateLimiter({("R", None): 9})
    shared = place()
    places = [HeldInstance("i", shared) for _ in range(3)]
    client = client_of(limiter, *places)
    for name in "abc":
        client.submit(name)
    assert [each.ids for each in places] == [[["a"]], [], []]
    assert limiter.free(("R", 0)) == 8
    await client.model.close()
    assert all(each.is_closed for each in places)


async def test_an_instance_that_raises_gives_back_what_it_had() -> None:
    class Faulty(AtOnceInstance):
        placement = place()

        def execute(self, jobs: object, done: object) -> None:
            raise RuntimeError("a bug")

    limiter = RateLimiter()
    other = HeldInstance("other", place())
    client_of(limiter, Faulty()).submit("a")
    client_of(limiter, other).submit("a")
    assert other.is_running


async def test_a_model_that_is_closed_gives_back_what_it_had_and_what_it_waited_for() -> None:
    limiter = RateLimiter()
    instances = [HeldInstance(name, place()) for name in "abc"]
    clients = [client_of(limiter, each) for each in instances]
    for client in clients:
        client.submit("x")
    assert [each.is_running for each in instances] == [True, False, False]
    await clients[1].model.close()
    await clients[0].model.close()
    assert instances[2].is_running
    await clients[2].model.close()
    assert limiter.is_idle
    assert limiter.free(("R", 0)) == 0


async def test_a_long_queue_before_instances_that_answer_at_once_does_not_recurse() -> None:
    class AtOnce(AtOnceInstance):
        def __init__(self) -> None:
            self.placement = place()

    limiter = RateLimiter()
    busy = HeldInstance("busy", place())
    blocker = client_of(limiter, busy)
    blocker.submit("x")
    clients = [client_of(limiter, AtOnce()) for _ in range(2)]
    for number in range(3000):
        clients[number % 2].submit(str(number))
    busy.finish()
    assert [len(client.answered) for client in clients] == [1500, 1500]


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_ends_once_and_nothing_is_ever_over_committed(seed: int) -> None:
    chance = random.Random(seed)
    limiter = RateLimiter({("R", None): 3, ("G", None): 2})
    running: dict[Placement, int] = {}

    class Watched(RandomInstance):
        def execute(self, jobs: list[object], done: object) -> None:  # type: ignore[override]
            assert self.placement is not None
            running[self.placement] = running.get(self.placement, 0) + 1
            for name, total in (("R", 3), ("G", 2)):
                used = sum(
                    count * each.count for at, count in running.items() for each in at.resources if each.name == name
                )
                assert used <= total

            def freed() -> None:
                running[cast(Placement, self.placement)] -= 1
                done()  # type: ignore[operator]

            super().execute(jobs, freed)  # type: ignore[arg-type]

    clients = []
    for number in range(4):
        instances = []
        for place_number in range(chance.randint(1, 3)):
            instance = Watched(seed + 10 * number + place_number)
            resources = (Resource("R", chance.randint(0, 3)), Resource("G", chance.randint(0, 2), True))
            instance.placement = place(f"{number}_{place_number}", resources, chance.randint(0, 3))
            instances.append(instance)
        extra = chance.choice(["", "dynamic_batching { }", "dynamic_batching { max_queue_delay_microseconds: 200 }"])
        clients.append(client_of(limiter, *instances, extra=extra))
    submitted, cancelled = [0] * 4, [0] * 4
    for step in range(400):
        number = chance.randrange(4)
        job = clients[number].submit(str(step), rows=chance.randint(1, 4))
        submitted[number] += 1
        if chance.random() < 0.1 and not job.is_finished:
            job.cancel()
            cancelled[number] += 1
        if chance.random() < 0.2:
            await asyncio.sleep(0)
    await until(lambda: all(client.model.num_in_flight == 0 for client in clients))
    expected = [count - left for count, left in zip(submitted, cancelled, strict=True)]
    assert [len(client.answered) for client in clients] == expected
    assert limiter.is_idle


async def test_warm_up_waits_for_resources_too() -> None:
    limiter = RateLimiter()
    other, instance = HeldInstance("other", place()), HeldInstance("i", place())
    busy, client = client_of(limiter, other), client_of(limiter, instance)
    busy.submit("x")
    warming = asyncio.create_task(client.model.warm_up(request("w")))
    await turns()
    assert not instance.is_running
    busy.submit("y")
    other.finish()
    await until(lambda: instance.is_running)
    assert not other.is_running
    instance.finish()
    await warming
    assert other.is_running
    other.finish()
