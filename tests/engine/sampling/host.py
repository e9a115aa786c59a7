"""The sampler over plain arrays of logits."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Rows
from sluice.engine.sampling import sampler
from sluice.engine.sampling.cores import ONE_CORE, Cores
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import TokenLogprob


def sample(
    logits: FloatArray, states: Sequence[SamplingState], rows: Rows | None = None, cores: Cores = ONE_CORE
) -> sampler.Samples:
    return sampler.sample(HostLogits(logits, cores), states, rows)


def prompt_logprobs(logits: FloatArray, token_ids: NDArray[np.integer], num_top: int) -> list[TokenLogprob]:
    return HostLogits(logits).logprobs(np.arange(len(logits)), token_ids, [num_top] * len(logits))
