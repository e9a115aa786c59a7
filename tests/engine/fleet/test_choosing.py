"""What a fleet's requests are routed by: prefixes, load, turns; over engines without processes."""

import pytest

from sluice.engine.fleet.choosing import hash_chain
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.router import RoutingPolicy
from sluice.engine.frames import PrefixChanges
from sluice.errors import ErrorCode, SluiceError
from tests.engine.fleet.fleets import leading_blocks
from tests.engine.fleet.simulated import Simulation
from tests.engine.parts import make_request


def home_of(fleet: FleetClient, request_id: str) -> str:
    [name] = (r.name for r in fleet.replicas for s in r.engine.open_streams if s.request.request_id == request_id)
    return name


def submit(fleet: FleetClient, prompt: list[int], request_id: str) -> str:
    fleet.submit(make_request(prompt, request_id, max_tokens=4))
    return home_of(fleet, request_id)


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    simulation = Simulation(1, 4)
    [fleet] = simulation.gateways
    prompts = [[number] * 40 for number in range(3)]
    homes = []
    for number, prompt in enumerate(prompts):
        homes.append(submit(fleet, prompt, f"first {number}"))
        simulation.settle()
    for number, prompt in enumerate(prompts):
        assert submit(fleet, [*prompt, 5, 6, 7], f"second {number}") == homes[number]
        simulation.settle()


def test_with_another_salt_or_adapter_it_is_another_prompt() -> None:
    info = Simulation(1, 2).gateways[0].info
    plain = make_request([1] * 8, "r")
    chains = [plain, make_request([1] * 8, "r", cache_salt="s"), make_request([1] * 8, "r", adapter="s")]
    assert len({hash_chain(each, info).hashes([1] * 8, 2)[1] for each in chains}) == 3
    assert hash_chain(plain, info).hashes([1] * 8, 2) == hash_chain(make_request([1] * 9, "q"), info).hashes([1] * 9, 2)


def test_what_a_lost_replica_had_is_forgotten() -> None:
    simulation = Simulation(1, 2)
    [fleet] = simulation.gateways
    home = submit(fleet, [1] * 40, "first")
    simulation.settle()
    assert sum(leading_blocks(fleet, make_request([1] * 40, "second"))) == 10
    simulation.engines[int(home)].crash()
    assert sum(leading_blocks(fleet, make_request([1] * 40, "second"))) == 0


def test_a_replica_whose_report_was_lost_says_anew_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    [fleet] = Simulation(1, 2).gateways
    replica, request, asked = fleet.replicas[0], make_request([1] * 40, "r"), []
    monkeypatch.setattr(replica.engine, "restart_prefixes", lambda: asked.append(True))
    blocks = hash_chain(request, fleet.info).hashes([1] * 40, 10)

    def report(number: int, block: int, *, is_first: bool = False) -> int:
        """Report one block, and return how many the fleet knows of then."""
        assert replica.engine.on_prefixes is not None
        replica.engine.on_prefixes(PrefixChanges(number, blocks[block], b"", is_first))
        return leading_blocks(fleet, request)[replica.number]

    assert [report(1, 0, is_first=True), report(2, 1)] == [1, 2] and not asked
    assert report(4, 3) == 0 and len(asked) == 1
    assert [report(5, 0), report(6, 1)] == [0, 0] and len(asked) == 1, "it is asked once, until it begins anew"
    assert [report(1, 0, is_first=True), report(2, 1)] == [1, 2]
    assert report(9, 2) == 0 and len(asked) == 2


@pytest.mark.parametrize("policy", [RoutingPolicy.LEAST_LOADED, RoutingPolicy.ROUND_ROBIN])
def test_other_policies_spread_equal_prompts(policy: RoutingPolicy) -> None:
    simulation = Simulation(1, 3, policy=policy)
    [fleet] = simulation.gateways
    for number in range(6):
        submit(fleet, [1] * 20, f"r{number}")
    assert [each.num_routed for each in fleet.replicas] == [2, 2, 2]
    simulation.settle()


def test_one_that_drains_or_weighs_nothing_gets_no_requests() -> None:
    simulation = Simulation(1, 3)
    [fleet] = simulation.gateways
    fleet.replicas[0].is_draining = True
    fleet.replicas[1].weight = 0.0
    assert {submit(fleet, [number], f"r{number}") for number in range(5)} == {"2"}
    simulation.settle()


async def test_without_a_replica_requests_are_refused() -> None:
    simulation = Simulation(1, 2)
    [fleet] = simulation.gateways
    stream = fleet.submit(make_request([1], "r"))
    await fleet.stop()
    assert fleet.failure == "the engine was stopped"
    with pytest.raises(SluiceError, match="the engine was stopped") as refused:
        fleet.submit(make_request([1], "r"))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(SluiceError, match="stopped"):
        await anext(stream)
