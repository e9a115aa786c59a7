"""The engine alone admits, whoever sends what in which order: no replica promises more blocks than it has, and each
request is served once, or refused because all replicas are full."""

import random

import pytest

from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from tests.engine.fake_runner import echo
from tests.engine.fleet.simulated import Simulation
from tests.engine.parts import make_request


async def outcome(stream: GenerationStream) -> list[int] | SluiceError:
    """The whole answer of a stream that has ended, or its error."""
    tokens: list[int] = []
    try:
        async for event in stream:
            tokens += event.token_ids
            assert event.finish_reason in (None, FinishReason.LENGTH)
    except SluiceError as error:
        return error
    return tokens


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 20))])
async def test_random_interleavings(seed: int) -> None:
    rng = random.Random(seed)
    has_crashes = seed % 2 == 1
    simulation = Simulation(rng.randint(1, 3), rng.randint(2, 3), max_queued_requests=rng.choice([1, 3, 50]))
    asked: dict[str, tuple[list[int], int]] = {}
    num_crashes = 0
    for number in range(500):
        action = rng.random()
        if action < 0.15:
            prompt, max_tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 20))], rng.randint(1, 20)
            request_id = f"r{number}"
            asked[request_id] = prompt, max_tokens
            gateway = rng.choice(simulation.gateways)
            simulation.streams[request_id] = gateway.submit(make_request(prompt, request_id, max_tokens=max_tokens))
        elif action < 0.45:
            rng.choice(simulation.clients).send_one()
        elif action < 0.7:
            rng.choice(simulation.engines).step()
        elif action < 0.993 or not has_crashes:
            rng.choice(simulation.clients).receive_one()
        else:
            rng.choice(simulation.engines).crash()
            num_crashes += 1
        simulation.check()
    simulation.settle()
    num_refused = num_blamed = 0
    for request_id, (prompt, max_tokens) in asked.items():
        found = await outcome(simulation.streams[request_id])
        if isinstance(found, SluiceError) and found.code is ErrorCode.INTERNAL:
            num_blamed += 1  # the only suspect of two crashes
        elif isinstance(found, SluiceError):
            assert (found.code, found.predicted_wait_s) == (ErrorCode.OVERLOADED, None), found
            assert found.retry_after_s is not None
            num_refused += 1
        else:
            assert found == echo(prompt, max_tokens)
    assert num_blamed <= num_crashes // 2 * len(simulation.gateways)
    assert num_refused + num_blamed < len(asked)
    for engine in simulation.engines:
        assert engine.executor.stats().num_blocks_reserved == 0


async def test_a_request_goes_to_the_replica_that_can_admit_it_soonest_whatever_statistics_say() -> None:
    simulation = Simulation(2, 2)
    one, other = simulation.gateways
    for gateway in (one, other):  # the forecasts learn how long steps take
        streams = [gateway.submit(make_request([number], f"w{number}", max_tokens=20)) for number in range(12)]
        simulation.settle()
        assert all(len(stream.output_token_ids) == 20 for stream in streams)
    crowd = [one.replicas[0].engine.submit(make_request([n], f"c{n}", max_tokens=40)) for n in range(12)]
    for client in simulation.clients:
        while client.outbox:
            client.send_one()
    simulation.engines[0].step()
    stream = other.submit(make_request([7], "late", max_tokens=5))
    home = next(each for each in other.replicas if each.engine.open_streams)
    if home.name == "0":  # by its old statistics that engine was idle
        for client in simulation.clients:
            while client.outbox:
                client.send_one()
        simulation.engines[0].step()
        for client in simulation.clients:
            while client.inbox:
                client.receive_one()
        home = next(each for each in other.replicas if each.engine.open_streams)
    assert home.name == "1"
    simulation.settle()
    assert await outcome(stream) == echo([7], 5)
    assert len(crowd) == 12


async def test_where_all_queues_are_full_the_least_time_to_wait_is_told() -> None:
    simulation = Simulation(1, 2, max_queued_requests=0)
    [gateway] = simulation.gateways
    streams = [gateway.submit(make_request([number], f"r{number}", max_tokens=20)) for number in range(8)]
    simulation.settle()
    found = [await outcome(stream) for stream in streams]
    refused = [each for each in found if isinstance(each, SluiceError)]
    assert len(refused) == 2  # two replicas with three places each
    assert all(each.code is ErrorCode.OVERLOADED and each.retry_after_s == 1.0 for each in refused)
