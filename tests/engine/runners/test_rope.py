"""Rotary frequencies against values worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest

from engine.runners.openvino.rope import inverse_frequencies, read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_default_falls_from_one_towards_theta() -> None:
    frequencies = inverse_frequencies(read_rope({"rope_theta": 10_000.0}), head_dim=4)
    np.testing.assert_allclose(frequencies, [1.0, 0.01], rtol=1e-6)
    assert frequencies.dtype == np.float32


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 100.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0},
    ],
)
def test_linear_in_every_spelling(config: dict[str, Any]) -> None:
    np.testing.assert_allclose(inverse_frequencies(read_rope(config), head_dim=4), [0.25, 0.025], rtol=1e-6)


def test_llama3_keeps_fast_frequencies_and_slows_slow_ones() -> None:
    plain = inverse_frequencies(read_rope({"rope_theta": 500_000.0}), head_dim=128)
    scaled = inverse_frequencies(read_rope({"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}}), head_dim=128)
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    np.testing.assert_allclose(scaled[fast], plain[fast], rtol=1e-6)
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()
