"""Decisions of the router, with their reasons."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.router import ReplicaChoice, ReplicaView, RoutedRequest, RouterSettings, RoutingPolicy, choose
from sluice.errors import ErrorCode, SluiceError

PROMPT = [number.to_bytes(16) for number in range(1, 32)]


def view(number: int, **fields: Any) -> ReplicaView:
    usual: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "decode_seconds_per_step": 0.01}
    return ReplicaView(name="abcdefgh"[number], number=number, **usual | fields)


def routed(**fields: Any) -> RoutedRequest:
    usual: dict[str, Any] = {"ticket": 0, "num_prompt_tokens": 1000, "max_tokens": 100, "block_hashes": PROMPT}
    return RoutedRequest(**usual | fields)


def holding(*counts: int) -> PrefixIndex:
    """Return an index in which each replica has so many blocks of PROMPT."""
    index = PrefixIndex()
    for replica, count in enumerate(counts):
        index.apply(replica, 0, b"".join(PROMPT[:count]), b"", True)
    return index


def chosen(replicas: Sequence[ReplicaView], index: PrefixIndex | None = None, **fields: Any) -> ReplicaChoice:
    settings = fields.pop("settings", RouterSettings())
    return choose(routed(**fields), replicas, index or PrefixIndex(), settings)


GOLDENS: list[tuple[str, list[ReplicaView], tuple[int, ...], dict[str, Any], str, dict[str, float]]] = [
    (
        "the holder of the prefix saves its prefill",
        [view(0), view(1)],
        (0, 25),
        {},
        "b",
        {"prefill": 0.2, "wait": 0.0, "decode": 0.32},
    ),
    (
        "a holder that waits less than computing takes keeps its prefix",
        [view(0), view(1, predicted_wait_s=0.79)],
        (0, 25),
        {},
        "b",
        {"prefill": 0.2, "wait": 0.79, "decode": 0.32},
    ),
    (
        "a hot prefix spreads when its holder waits longer than computing takes",
        [view(0), view(1, predicted_wait_s=0.81)],
        (0, 25),
        {},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "computing a prompt counts more where it delays others",
        [view(0, num_running=8), view(1, num_running=8, predicted_wait_s=2.0)],
        (0, 25),
        {},
        "b",
        {"prefill": 0.6, "wait": 2.0, "decode": 0.32},
    ),
    (
        "even there a hot prefix spreads, once its holder waits so much longer",
        [view(0, num_running=8), view(1, num_running=8, predicted_wait_s=2.41)],
        (0, 25),
        {},
        "a",
        {"prefill": 3.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "what was sent since the statistics counts as wait",
        [view(0), view(1, predicted_wait_s=0.5, sent_tokens=400)],
        (0, 25),
        {},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "what is being computed counts where statistics predict no wait",
        [view(0), view(1, prefilling_tokens=900)],
        (0, 25),
        {},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "a faster replica may compute sooner than a holder",
        [view(0, prefill_tokens_per_s=10_000.0), view(1)],
        (0, 25),
        {},
        "a",
        {"prefill": 0.1, "wait": 0.0, "decode": 0.32},
    ),
    (
        "slow decode outweighs a short prefix",
        [view(0), view(1, decode_seconds_per_step=0.04)],
        (0, 25),
        {},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "an unknown rate counts as the usual one",
        [view(0, prefill_tokens_per_s=0.0), view(1)],
        (),
        {},
        "a",
        {"prefill": 0.5, "wait": 0.0, "decode": 0.32},
    ),
    (
        "a replica with the adapter goes before the holder of the prefix",
        [view(0, adapters=frozenset({"fr"})), view(1)],
        (0, 25),
        {"adapter": "fr", "settings": RouterSettings(adapter_load_s=2.0)},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
    (
        "an adapter is loaded where that takes less than waiting",
        [view(0, adapters=frozenset({"fr"}), predicted_wait_s=5.0), view(1)],
        (),
        {"adapter": "fr", "settings": RouterSettings(adapter_load_s=2.0)},
        "b",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32, "adapter": 2.0},
    ),
    (
        "a session stays where that costs little",
        [view(0), view(1, predicted_wait_s=0.04)],
        (),
        {"session": "s", "session_replica": "b"},
        "b",
        {"prefill": 1.0, "wait": 0.04, "decode": 0.32, "session": -0.05},
    ),
    (
        "a session leaves where staying costs more than its bonus",
        [view(0), view(1, predicted_wait_s=0.06)],
        (),
        {"session": "s", "session_replica": "b"},
        "a",
        {"prefill": 1.0, "wait": 0.0, "decode": 0.32},
    ),
]


@pytest.mark.parametrize(
    ("replicas", "held", "fields", "name", "parts"), [row[1:] for row in GOLDENS], ids=[row[0] for row in GOLDENS]
)
def test_decisions(
    replicas: list[ReplicaView], held: tuple[int, ...], fields: dict[str, Any], name: str, parts: dict[str, float]
) -> None:
    choice = chosen(replicas, holding(*held), **fields)
    assert choice.replica.name == name
    assert choice.parts == pytest.approx(parts)
    assert choice.cost_s == pytest.approx(sum(parts.values()))


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    choice = chosen([view(0)], holding(31), num_prompt_tokens=31 * 32)
    assert choice.num_cached_tokens == 30 * 32
    assert chosen([view(0)], holding(31), num_prompt_tokens=31 * 32 + 1).num_cached_tokens == 31 * 32


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_equal_replicas_take_turns(policy: RoutingPolicy) -> None:
    views = [view(number) for number in range(4)]
    for seed in (0, 3):
        settings = RouterSettings(policy=policy, seed=seed)
        names = [chosen(views, ticket=ticket, settings=settings).replica.name for ticket in range(8)]
        assert names == [views[(ticket + seed) % 4].name for ticket in range(8)]


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_draining_silent_excluded_and_weightless_replicas_get_nothing(policy: RoutingPolicy) -> None:
    views = [view(0, is_draining=True), view(1, is_silent=True), view(2), view(3, weight=0.0), view(4)]
    settings = RouterSettings(policy=policy)
    names = {
        chosen(views, ticket=ticket, exclude=frozenset("c"), settings=settings).replica.name for ticket in range(9)
    }
    assert names == {"e"}


def test_an_adapter_that_cannot_be_loaded_excludes() -> None:
    views = [view(0, adapters=frozenset({"fr"}), predicted_wait_s=60.0), view(1)]
    assert chosen(views, adapter="fr").replica.name == "a"
    with pytest.raises(SluiceError, match="no replica has loaded the adapter 'de'; 2 could take") as caught:
        chosen(views, adapter="de")
    assert (caught.value.code, caught.value.param) == (ErrorCode.NOT_FOUND, "adapter")


def test_the_error_says_why_nobody_can_take_a_request() -> None:
    views = [view(0, is_draining=True), view(1, is_silent=True), view(2), view(3, weight=0.0)]
    with pytest.raises(SluiceError) as caught:
        chosen(views, exclude=frozenset("c"))
    assert caught.value.code == ErrorCode.UNAVAILABLE
    expected = (
        "none of 4 replicas can take the request: 1 refused it, 1 are draining, 1 are silent, 1 have the weight 0"
    )
    assert caught.value.message == expected
    with pytest.raises(SluiceError, match="none of 0 replicas can take the request: there are none"):
        chosen([])


def test_the_least_loaded_has_the_fewest_sequences() -> None:
    settings = RouterSettings(policy=RoutingPolicy.LEAST_LOADED)
    views = [view(0, num_running=3), view(1, num_running=1, num_waiting=1), view(2, num_running=1, num_sent=2)]
    assert chosen(views, holding(31), settings=settings).replica.name == "b"


def test_versions_share_requests_by_their_weights() -> None:
    views = [view(0, version="1", weight=95.0), view(1, version="1", weight=95.0), view(2, version="2", weight=5.0)]
    names = Counter(chosen(views, ticket=ticket).replica.version for ticket in range(10_000))
    assert names["2"] == pytest.approx(500, abs=5)
    within = [chosen(views, ticket=ticket).replica.version for ticket in range(200)]
    assert within.count("2") in range(9, 12)  # evenly, not in bursts


def test_a_session_stays_with_its_version() -> None:
    views = [view(0, version="1", weight=3.0), view(1, version="2", weight=1.0)]
    of_session = {
        session: {
            chosen(views, session=session, ticket=t, settings=RouterSettings(seed=t)).replica.name for t in range(9)
        }
        for session in map(str, range(400))
    }
    assert all(len(names) == 1 for names in of_session.values())
    assert 70 <= sum(names == {"b"} for names in of_session.values()) <= 130


def test_it_takes_the_least_cost_of_all() -> None:
    """The loop over the replicas agrees with the parts that a choice names."""
    rng = random.Random(1)
    for ticket in range(300):
        index = holding(*(rng.randrange(32) for _ in range(8)))
        views = [
            view(
                number,
                predicted_wait_s=rng.choice((0.0, rng.random())),
                prefill_tokens_per_s=rng.choice((0.0, 500.0, 1000.0)),
                decode_seconds_per_step=rng.choice((0.01, 0.02)),
                sent_tokens=rng.choice((0, 100)),
                prefilling_tokens=rng.choice((0, 300)),
                adapters=rng.choice((frozenset({"fr"}), frozenset())),
            )
            for number in range(8)
        ]
        fields: dict[str, Any] = {
            "adapter": rng.choice(("", "fr")),
            "session_replica": rng.choice(("", "c")),
            "settings": RouterSettings(adapter_load_s=0.3),
        }
        best = chosen(views, index, ticket=ticket, **fields)
        alone = [chosen([each], index, ticket=ticket, **fields).cost_s for each in views]
        assert best.cost_s == min(alone)
