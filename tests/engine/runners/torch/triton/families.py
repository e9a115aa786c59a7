"""The interpreter's process for whole families: what the kernels for a GPU compute, beside plain torch on the CPU."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np

from engine.runners.torch import model
from engine.runners.torch.cuda_kernels import CudaKernels
from engine.runners.torch.kernels import TorchKernels
from engine.runners.torch.runner import TorchRunner
from tests.engine.runners.drive import Prompt, _Sequence, make_batch
from tests.engine.runners.torch.loaded import load_family
from tests.engine.runners.torch.triton.worker import Answer, serve

LENGTHS = (1, 1, 3, 34)
"""New tokens of the sequences of a step: decodes before chunks of prompts, as the executor orders them."""
PAST = (33, 5, 20, 0)


def compare(name: str) -> Answer:
    """Return the largest difference of logits of a mixed step, as a share of the largest logit."""
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = load_family(name, Path(folder))
        with patch.object(model, "_kernels_for", lambda device: CudaKernels):
            fused, _ = load_family(name, Path(folder))
    expected, found = (_run(runner) for runner in (plain, fused))
    return {"error": float(np.abs(found - expected).max() / np.abs(expected).max())}


def _run(runner: TorchRunner) -> np.ndarray:
    """Return the logits of each sequence of a step whose past was computed by plain torch."""
    random = np.random.default_rng(3)
    sequences = [
        _Sequence(Prompt([], 1), [2 * each, 2 * each + 1], random.integers(3, 100, past + new).tolist())
        for each, (past, new) in enumerate(zip(PAST, LENGTHS, strict=True))
    ]
    kernels, runner._model._kernels.__class__ = runner._model._kernels.__class__, TorchKernels
    with_past = [each for each, past in zip(sequences, PAST, strict=True) if past]
    runner.run(make_batch(with_past, [past for past in PAST if past], [False] * len(with_past)))
    runner._model._kernels.__class__ = kernels
    for sequence, past in zip(sequences, PAST, strict=True):
        sequence.num_computed = past
    return runner.run(make_batch(sequences, LENGTHS, [True] * len(sequences))).read()


if __name__ == "__main__":
    serve(compare)
