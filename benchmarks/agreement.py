"""The error of compressed weights and caches against float32, on the bundled model and this project's documents.

    python -m benchmarks.agreement [--torch] [CHECKPOINT]

With `--torch` the variants of torch's runner, on the CPU, over the first texts: its products in 8 bits are slow there.

Every text is read once (teacher forcing), so that a difference does not grow with what follows. Columns of the table:
the share of positions at which the likeliest token is float32's; the mean Kullback-Leibler divergence of the
distributions in nats; the mean and the largest error of a logit after the mean of all logits is subtracted; perplexity.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner, StepBatch
from sluice.engine.runners.openvino.runner import load_runner

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "docs/architecture.md", "docs/performance.md", "CONTRIBUTING.md")
LENGTH = 256
MAX_CHUNKS = 40

VARIANTS = (
    {"dtype": "bf16"},
    {"dtype": "f32", "kv_cache_dtype": "u8"},
    {"dtype": "bf16", "kv_cache_dtype": "u8"},
    {"dtype": "f32", "quantization": "int8"},
    {"dtype": "bf16", "quantization": "int8"},
    {"dtype": "bf16", "quantization": "int8", "kv_cache_dtype": "u8"},
    {"dtype": "f32", "quantization": "int4"},
    {"dtype": "bf16", "quantization": "int4"},
    {"dtype": "bf16", "quantization": "int4", "kv_cache_dtype": "u8"},
)
ON_TORCH = (
    {"dtype": "bf16"},
    {"dtype": "f32", "quantization": "fp8"},
    {"dtype": "bf16", "quantization": "fp8"},
)
CHUNKS_ON_TORCH = 8


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a variant from float32, over all positions."""

    same_token: float
    divergence: float
    mean_error: float
    max_error: float
    perplexity: float


def main() -> None:
    """Print the table."""
    on_torch, others = "--torch" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--torch"]
    checkpoint = Path(others[0]) if others else ROOT / "models" / "rill" / "1"
    texts = list(read_texts(checkpoint))[: CHUNKS_ON_TORCH if on_torch else MAX_CHUNKS]
    exact = logits(load(checkpoint, "", dtype="f32"), texts)
    print(f"{len(texts)} texts of {LENGTH} tokens; perplexity of float32 {perplexity(exact, texts):.3f}\n")
    print("| weights | computed in | KV cache | same token | divergence | logit error, mean (max) | perplexity |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for variant in ON_TORCH if on_torch else VARIANTS:
            runner = (load_on_torch if on_torch else load)(checkpoint, cache, **variant)
            print(row(runner, compare(logits(runner, texts), exact, texts)))
            runner.close()


def load(checkpoint: Path, cache: str, **fields: str) -> Runner:
    """Load a runner with KV blocks for one text."""
    return load_runner(EngineConfig(model_path=str(checkpoint), num_blocks=16, cache_path=cache, **fields))  # type: ignore[arg-type]


def load_on_torch(checkpoint: Path, cache: str, **fields: str) -> Runner:
    """Load torch's runner on the CPU, which needs no folder for a cache."""
    from sluice.engine.runners.torch import runner  # only where torch is installed

    return runner.load_runner(EngineConfig(model_path=str(checkpoint), num_blocks=16, device="cpu", **fields))  # type: ignore[arg-type]


def read_texts(checkpoint: Path) -> Iterator[list[int]]:
    """Yield the project's documents, cut into pieces of LENGTH tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = [token for name in TEXTS for token in tokenizer.encode((ROOT / name).read_text()).ids]
    for start in range(0, min(len(ids) - LENGTH, MAX_CHUNKS * LENGTH), LENGTH):
        yield ids[start : start + LENGTH]


def logits(runner: Runner, texts: list[list[int]]) -> FloatArray:
    """Return logits [texts, LENGTH, vocab_size]. Each text is read in two chunks; the second reads the cache."""
    return np.stack([np.concatenate([chunk.copy() for chunk in _read(runner, text)]) for text in texts])


def _read(runner: Runner, text: list[int]) -> Iterator[FloatArray]:
    for start, stop in ((0, LENGTH // 2), (LENGTH // 2, LENGTH)):
        num_blocks = -(-stop // runner.info.block_size)
        logits = runner.run(
            StepBatch(
                token_ids=np.array(text[start:stop], np.int32),
                position_ids=np.arange(start, stop, dtype=np.int32),
                past_lens=np.array([start], np.int32),
                subsequence_begins=np.array([0, stop - start], np.int32),
                block_indices=np.arange(num_blocks, dtype=np.int32),
                block_indices_begins=np.array([0, num_blocks], np.int32),
                sampled_rows=np.arange(stop - start, dtype=np.int32),
                max_context_len=stop,
            )
        )
        yield logits.read()


def compare(actual: FloatArray, exact: FloatArray, texts: list[list[int]]) -> Distance:
    """Compare `actual` with `exact`, both [texts, LENGTH, vocab_size]."""
    p, q = log_softmax(exact), log_softmax(actual)
    errors = np.abs((actual - actual.mean(-1, keepdims=True)) - (exact - exact.mean(-1, keepdims=True)))
    return Distance(
        same_token=float((actual.argmax(-1) == exact.argmax(-1)).mean()),
        divergence=float((np.exp(p) * (p - q)).sum(-1).mean()),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        perplexity=perplexity(actual, texts),
    )


def perplexity(values: FloatArray, texts: list[list[int]]) -> float:
    """Return the perplexity of the texts' own tokens."""
    targets = np.array(texts)[:, 1:, None]
    return float(np.exp(-np.take_along_axis(log_softmax(values)[:, :-1], targets, -1).mean()))


def log_softmax(values: FloatArray) -> NDArray[np.float64]:
    """Compute the log softmax along the last axis."""
    shifted = (values - values.max(-1, keepdims=True)).astype(np.float64)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def row(runner: Runner, distance: Distance) -> str:
    """Format one line of the table."""
    info = runner.info
    weights = "as stored" if info.quantization == "none" else info.quantization
    return (
        f"| {weights} | {info.dtype} | {info.kv_cache_dtype} | {distance.same_token:.2%} | {distance.divergence:.5f} | "
        f"{distance.mean_error:.3f} ({distance.max_error:.2f}) | {distance.perplexity:.3f} |"
    )


if __name__ == "__main__":
    main()
