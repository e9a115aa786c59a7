"""Shares of versions: drawn by chance, kept by key, and always of versions that are there."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.repository.routing import PARAMETER, VersionWeights, configured_weights, routing_point

NUM_REQUESTS = 10_000
CANARY = VersionWeights({1: 95, 2: 5})


def config_with(text: str) -> ModelConfig:
    config = ModelConfig(name="m")
    config.parameters[PARAMETER].string_value = text
    return config


@pytest.mark.parametrize("key", ["", "client {}"], ids=["by chance", "by key"])
def test_a_canary_gets_its_share(key: str) -> None:
    chosen = Counter(CANARY.choose([1, 2], routing_point("m", key.format(number))) for number in range(NUM_REQUESTS))
    sigma = (NUM_REQUESTS * 0.05 * 0.95) ** 0.5
    assert abs(chosen[2] - NUM_REQUESTS * 0.05) < 4 * sigma
    assert chosen[1] + chosen[2] == NUM_REQUESTS


def test_who_is_in_the_canary_stays_while_it_grows() -> None:
    points = [routing_point("m", f"client {number}") for number in range(1000)]
    small = {point for point in points if CANARY.choose([1, 2], point) == 2}
    grown = {point for point in points if VersionWeights({1: 80, 2: 20}).choose([1, 2], point) == 2}
    assert small < grown


def test_models_have_cohorts_of_their_own() -> None:
    assert routing_point("m", "client") == routing_point("m", "client") != routing_point("n", "client")


def test_what_is_not_ready_gets_nothing() -> None:
    assert CANARY.shares([1]) == {1: 1.0}
    assert VersionWeights({1: 1, 2: 0}).shares([2, 3]) == {}
    assert VersionWeights({1: 1, 2: 0}).choose([2, 3], 0.5) is None


@given(
    st.dictionaries(st.integers(1, 9), st.floats(0, 1e6), min_size=1).filter(lambda each: any(each.values())),
    st.sets(st.integers(1, 9)),
    st.floats(0, 1, exclude_max=True),
)
def test_only_ready_versions_with_a_weight_are_chosen(weights: dict[int, float], ready: set[int], point: float) -> None:
    routing = VersionWeights(weights)
    chosen = routing.choose(ready, point)
    if routing.shares(ready):
        assert chosen in ready and weights[chosen] > 0
    else:
        assert chosen is None


def test_weights_of_a_configuration() -> None:
    assert configured_weights(ModelConfig()) is None
    assert configured_weights(config_with("1=95, 2=5")) == CANARY


@pytest.mark.parametrize("text", ["", "1", "1=a", "a=1", "1=95;2=5", "1=0", "1=-1,2=3", "1=inf", "1=nan,2=1"])
def test_what_is_no_list_of_weights_is_refused(text: str) -> None:
    with pytest.raises(SluiceError, match="weights") as caught:
        configured_weights(config_with(text))
    assert caught.value.code is ErrorCode.INVALID
