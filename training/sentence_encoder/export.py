"""Writes the model: the int8 graph, the tokenizer, and the float vectors that tests compare with."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from . import checkpoint
from .checkpoint import Floats
from .graph import build
from .reference import Reference

MODELS = Path("models")
GOLDENS = Path("tests/data/rag")
LEAST_COSINE = 0.99
_CALIBRATION = Path(__file__).with_name("calibration.txt")
_ONE_THREAD = 1
"""The check's figures shall not depend on the machine's cores."""


def calibration_texts() -> list[str]:
    """What activations are measured on: passages of this project's documentation, and short questions."""
    return [text.strip() for text in _CALIBRATION.read_text().split("\n---\n")]


def sentences() -> list[str]:
    """What the result is checked on; none of it is calibrated with."""
    texts: list[str] = json.loads((GOLDENS / "sentences.json").read_text())
    return texts


def vectors(model: Path, token_ids: Sequence[Sequence[int]]) -> Floats:
    """What the exported model makes of them, all in one batch."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _ONE_THREAD
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    lengths = np.array([len(ids) for ids in token_ids], np.int32)
    inputs = {"input_ids": np.concatenate(token_ids).astype(np.int64), "lengths": lengths}
    found: Floats = session.run(["embeddings"], inputs)[0]
    return found


def write_model(models: Path, reference: Reference) -> Path:
    """Into `sentence_encoder` and `sentence_tokenizer` of the repository `models`. Returns the graph's file."""
    target, tokenizer = models / "sentence_encoder" / "1", models / "sentence_tokenizer" / "1"
    for folder in (target, tokenizer):
        folder.mkdir(parents=True, exist_ok=True)
    graph = build(checkpoint.read(), reference.input_maxima(calibration_texts()))
    onnx.save(graph, target / "model.onnx")
    shutil.copyfile(checkpoint.folder() / "tokenizer.json", tokenizer / "tokenizer.json")
    return target / "model.onnx"


def check(model: Path, reference: Reference) -> Floats:
    """The package's vectors of `sentences()`. Raises SystemExit where the model's are too far from them."""
    texts = sentences()
    expected = reference.vectors(texts)
    cosines = (vectors(model, [reference.token_ids(text) for text in texts]) * expected).sum(axis=1)
    worst = int(cosines.argmin())
    print(f"cosine to the package's vectors: mean {cosines.mean():.4f}, least {cosines[worst]:.4f} ({texts[worst]!r})")
    if cosines[worst] < LEAST_COSINE:
        raise SystemExit(f"the least must be {LEAST_COSINE} or more")
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="the repository to write into (%(default)s)")
    parser.add_argument("--goldens", type=Path, default=GOLDENS, help="where the float vectors go (%(default)s)")
    options = parser.parse_args()
    reference = Reference()
    model = write_model(options.models, reference)
    print(f"{model}: {model.stat().st_size / 1e6:.1f} MB")
    expected = check(model, reference)
    options.goldens.mkdir(parents=True, exist_ok=True)
    np.save(options.goldens / "sentence_vectors.npy", expected.astype(np.float16))


if __name__ == "__main__":
    main()
