"""The numbers of replicas as a scraper reads them, and the pressure on a model."""

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from sluice.engine.fleet.choosing import ReplicaChooser
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.handover import HandoverOutcome, PromptHandover, SplitReason
from sluice.engine.fleet.router import DEFAULT_ROUTING
from sluice.gateway.telemetry.replicas import (
    ReplicaCollector,
    RoutingCollector,
    ScalePressure,
    collect_splits,
    missing_replicas,
)
from sluice.pipelines.llm.text import LlmText
from tests.engine.fleet.simulated import NUM_BLOCKS, Simulation
from tests.engine.parts import make_request


def model_of(fleet: object, name: str = "m") -> LlmText:
    return cast(LlmText, SimpleNamespace(name=name, engine=fleet))


@pytest.fixture
def fleet() -> FleetClient:
    simulation = Simulation(1, 2)
    [fleet] = simulation.gateways
    for number in range(3):
        fleet.submit(make_request([number], f"r{number}", max_tokens=4))
    for client in simulation.clients:
        while client.outbox:
            client.send_one()
    for engine in simulation.engines:
        engine.step()
    for client in simulation.clients:
        while client.inbox:
            client.receive_one()
    return fleet


def test_each_replica_has_its_values(fleet: FleetClient) -> None:
    registry = CollectorRegistry(auto_describe=False)
    models = [model_of(fleet), model_of(SimpleNamespace(replicas=(), handover=None), "alone")]
    pressure = SimpleNamespace(of=lambda name, engine: {"m": 0.5, "alone": 1.5}[name])
    registry.register(ReplicaCollector(lambda: models, cast(ScalePressure, pressure)))
    registry.register(RoutingCollector(lambda: models))

    def values(name: str) -> list[float | None]:
        return [registry.get_sample_value(name, {"model": "m", "replica": each}) for each in "01"]

    assert sorted(cast(list[float], values("sluice_replica_sequences_running"))) == [1.0, 2.0]
    assert sum(cast(list[float], values("sluice_replica_requests_routed_total"))) == 3.0
    assert values("sluice_replica_migrations_total") == [0.0, 0.0]
    assert values("sluice_replica_up") == [1.0, 1.0]
    fleet.replicas[0].is_draining = True
    assert values("sluice_replica_up") == [0.0, 1.0]
    assert registry.get_sample_value("sluice_replica_up", {"model": "alone", "replica": "0"}) is None
    assert registry.get_sample_value("sluice_scale_pressure", {"model": "alone"}) == 1.5


def test_what_does_not_serve_is_named(fleet: FleetClient) -> None:
    assert missing_replicas([model_of(fleet)]) == ""
    fleet.replicas[0].engine.is_restarting = True
    assert missing_replicas([model_of(fleet)]) == "1 of 2 replicas serve m: replica 0 is restarting"
    fleet.replicas[0].engine.failure = "lost"
    fleet.replicas[1].is_draining = True
    text = "0 of 2 replicas serve m: replica 0 is given up, replica 1 takes no new requests"
    assert missing_replicas([model_of(fleet)]) == text


def test_pressure_is_the_larger_of_wait_and_memory() -> None:
    simulation, now = Simulation(1, 2), 0.0
    [fleet] = simulation.gateways
    pressure = ScalePressure(2.0, lambda: now)

    def wait(seconds: float, num_reserved: int = 0) -> None:
        for each in fleet.replicas:
            each.engine.stats = msgspec.structs.replace(
                each.engine.stats, predicted_wait_s=seconds, num_blocks_reserved=num_reserved
            )

    assert pressure.of("m", fleet) == 0.0
    wait(3.0)
    assert pressure.of("m", fleet) == 1.5
    for now in range(20):
        wait(4.0 if now < 3 else 1.0)
        pressure.observe([model_of(fleet)])
    assert pressure.of("m", fleet) == 2.0  # three of twenty waited for 4 s
    now = 75.0
    pressure.observe([model_of(fleet)])
    assert pressure.of("m", fleet) == 0.5
    wait(1.0, NUM_BLOCKS)
    assert pressure.of("m", fleet) == pytest.approx(1 / 0.9)
    pressure.observe([])
    wait(0.0)
    assert pressure.of("m", fleet) == 0.0


class _PrefillHandover(PromptHandover):
    has_prefill_replicas = True


def test_decisions_and_outcomes_of_fleets_with_prefill_replicas_are_counted() -> None:
    fleet, plain = (
        _PrefillHandover(ReplicaChooser([], DEFAULT_ROUTING)),
        PromptHandover(ReplicaChooser([], DEFAULT_ROUTING)),
    )
    fleet.decisions[SplitReason.SHORT] += 3
    fleet.outcomes[HandoverOutcome.LATE] += 2
    samples = [sample for family in collect_splits({"m": fleet, "plain": plain}) for sample in family.samples]
    assert {each.labels["model"] for each in samples} == {"m"}
    counted = {tuple(each.labels.values())[1]: each.value for each in samples if each.value}
    assert counted == {"short": 3.0, "late": 2.0}
    assert len(samples) == len(SplitReason) + len(HandoverOutcome)
