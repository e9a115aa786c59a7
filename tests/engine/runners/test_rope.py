"""Rotary frequencies against values computed by hand; `test_architectures` compares them with transformers."""

import math
from typing import Any

import numpy as np
import pytest

from sluice.engine.arrays import FloatArray
from sluice.engine.models.config.config_file import read_rope, read_ropes
from sluice.engine.models.config.rope import DynamicRope, LongRope, YarnRope, inverse_frequencies
from sluice.errors import ErrorCode, SluiceError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}


def frequencies(config: dict[str, Any], head_dim: int, max_model_len: int = 100) -> FloatArray:
    return inverse_frequencies(read_rope(config, partial=1.0), head_dim, max_model_len)


def test_default_falls_from_one_towards_theta() -> None:
    actual = frequencies({"rope_theta": 10_000.0}, head_dim=4)
    np.testing.assert_allclose(actual, [1.0, 0.01], rtol=1e-6)
    assert actual.dtype == np.float32


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 100},
    ],
)
def test_linear_in_every_spelling(config: dict[str, Any]) -> None:
    np.testing.assert_allclose(frequencies(config, head_dim=4), [0.25, 0.025], rtol=1e-6)


def test_theta_defaults_to_the_familys() -> None:
    rope = read_rope({"rope_parameters": {"rope_type": "default"}}, theta=100.0)
    np.testing.assert_allclose(inverse_frequencies(rope, 4, 100), [1.0, 0.1], rtol=1e-6)


def test_llama3_keeps_fast_frequencies_and_slows_slow_ones() -> None:
    plain = frequencies({"rope_theta": 500_000.0}, head_dim=128)
    scaled = frequencies({"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}}, head_dim=128)
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    np.testing.assert_allclose(scaled[fast], plain[fast], rtol=1e-6)
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


def test_a_part_of_the_head_turns() -> None:
    actual = frequencies({"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}, head_dim=8)
    np.testing.assert_allclose(actual, [1.0, 0.01], rtol=1e-6)


def test_proportional_falls_over_the_whole_head_and_stops() -> None:
    section = {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    actual = frequencies({"rope_parameters": section}, head_dim=8)
    np.testing.assert_allclose(actual, [1.0, 0.1, 0.0, 0.0], rtol=1e-6)


def test_dynamic_stretches_theta_with_the_context_served() -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 10_000.0, "max_position_embeddings": 64}
    within, beyond = frequencies(config, 8, max_model_len=64), frequencies(config, 8, max_model_len=128)
    np.testing.assert_allclose(within, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    theta = 10_000 * (2 * 128 / 64 - 1) ** (8 / 6)
    np.testing.assert_allclose(beyond, theta ** -np.array([0, 0.25, 0.5, 0.75]), rtol=1e-6)
    rope = read_rope(config)
    assert isinstance(rope, DynamicRope)
    assert rope.longest(64) == 128


def test_yarn_keeps_fast_components_and_slows_slow_ones() -> None:
    config = {"rope_parameters": {**YARN, "rope_theta": 1_000_000.0}, "max_position_embeddings": 131_072}
    plain, scaled = frequencies({"rope_theta": 1_000_000.0}, 128), frequencies(config, 128)
    turns = 32768 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 35], plain[turns > 35], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.9], plain[turns < 0.9] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
        ({"factor": None}, 0.1 * math.log(2) + 1),
    ],
)
def test_yarn_turns_heads_louder(fields: dict[str, Any], expected: float) -> None:
    rope = read_rope({"rope_parameters": {**YARN, **fields}, "max_position_embeddings": 65536})
    assert isinstance(rope, YarnRope)
    assert rope.amplitude(max_model_len=256) == pytest.approx(expected)


def test_longrope_divides_by_the_context_served() -> None:
    config = {"rope_scaling": LONG, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    np.testing.assert_allclose(frequencies(config, 4, max_model_len=64), [1.0, 0.005], rtol=1e-6)
    np.testing.assert_allclose(frequencies(config, 4, max_model_len=65), [0.25, 0.00125], rtol=1e-6)
    rope = read_rope(config)
    assert isinstance(rope, LongRope)
    assert rope.amplitude(max_model_len=256) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_a_rope_for_each_kind_of_layer() -> None:
    nested = {"full_attention": {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}, "sliding_attention": None}
    new = read_ropes({"rope_parameters": nested}, full_theta=1.0, sliding_theta=16.0)
    old = read_ropes(
        {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, full_theta=1.0, sliding_theta=16.0
    )
    assert new == old
    full, sliding = new["full_attention"], new["sliding_attention"]
    assert full is not None
    assert sliding is not None
    np.testing.assert_allclose(inverse_frequencies(full, 4, 100), [0.5, 0.05], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(sliding, 4, 100), [1.0, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "code", "expected"),
    [
        ({"rope_scaling": {"rope_type": "axial"}}, ErrorCode.UNIMPLEMENTED, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, ErrorCode.INVALID, "missing required field `factor`"),
        ({"partial_rotary_factor": 0.5}, ErrorCode.UNIMPLEMENTED, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_refused(config: dict[str, Any], code: ErrorCode, expected: str) -> None:
    with pytest.raises(SluiceError) as caught:
        read_rope(config)
    assert caught.value.code is code
    assert expected in caught.value.message


def test_longrope_with_too_few_factors() -> None:
    config = {"rope_scaling": LONG, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    with pytest.raises(SluiceError, match="longrope needs 4 factors, got 2"):
        frequencies(config, head_dim=8)
