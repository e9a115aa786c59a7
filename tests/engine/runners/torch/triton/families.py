"""The interpreter's process for whole families: what the kernels for a GPU compute, beside plain torch on the CPU."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sluice.engine.runners.torch import model
from sluice.engine.runners.torch.cuda_kernels import CudaKernels
from sluice.engine.runners.torch.kernels import TorchKernels
from sluice.engine.runners.torch.runner import TorchRunner
from sluice.engine.runners.torch.triton import elementwise
from tests.engine.runners.drive import Prompt, _Sequence, make_batch
from tests.engine.runners.torch.loaded import load_family
from tests.engine.runners.torch.triton.worker import Answer, serve

LENGTHS = (1, 1, 3, 34)
"""New tokens of the sequences of a step: decodes before chunks of prompts, as the executor orders them."""
PAST = (33, 5, 20, 0)


def compare(name: str) -> Answer:
    """Return the largest difference of logits of a mixed step, as a share of the largest logit, and how often the step
    launched each kernel between the products of matrices."""
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = load_family(name, Path(folder))
        with patch.object(model, "_kernels_for", lambda device: CudaKernels):
            fused, _ = load_family(name, Path(folder))
    expected, launches = _run(plain), Counter[str]()
    with _counting(launches):
        found = _run(fused)
    return {"error": float(np.abs(found - expected).max() / np.abs(expected).max()), "launches": launches}


@contextmanager
def _counting(launches: Counter[str]) -> Iterator[None]:
    """Count the launches of norms, of those that add an update first, and of rotations with and without storing."""

    def norm(*arguments: Any, **options: Any) -> torch.Tensor:
        launches["norm" if options.get("update") is None else "add and norm"] += 1
        return rms_norm(*arguments, **options)

    def rotate(*arguments: Any, **options: Any) -> torch.Tensor:
        launches["rotate"] += 1
        return rotate_alone(*arguments, **options)

    def rotate_and_store(*arguments: Any, **options: Any) -> torch.Tensor:
        launches["rotate and store"] += 1
        return rotate_stored(*arguments, **options)

    rms_norm, rotate_alone, rotate_stored = elementwise.rms_norm, elementwise.rotate, elementwise.rotate_and_store
    with patch.multiple(elementwise, rms_norm=norm, rotate=rotate, rotate_and_store=rotate_and_store):
        yield


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
