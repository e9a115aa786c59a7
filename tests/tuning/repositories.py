"""Repositories to tune: a model whose batches take the same time whatever their size, and a pipeline around it."""

from pathlib import Path

BATCH_S = 0.02
_MODEL = f"""
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({BATCH_S})
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each * 2)]) for each in inputs]
"""
_TENSORS = """
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
_STEP = """
  step {{ model_name: "{name}" model_version: -1
    input_map {{ key: "X" value: "{source}" }} output_map {{ key: "Y" value: "{target}" }} }}"""


def write_classifier(root: Path, name: str = "classifier", config: str = "") -> Path:
    """A model that takes BATCH_S for a batch, without a dynamic batcher."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    text = f'# written by hand\nbackend: "python"\nmax_batch_size: 16\n{_TENSORS}{config}'
    (root / name / "config.pbtxt").write_text(text)
    return root


def write_pipeline(root: Path) -> Path:
    """An ensemble of two such models."""
    for name in ("tokenizer", "bert"):
        write_classifier(root, name)
    (root / "pipeline" / "1").mkdir(parents=True)
    steps = _STEP.format(name="tokenizer", source="X", target="middle")
    steps += _STEP.format(name="bert", source="middle", target="Y")
    (root / "pipeline" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 16\n{_TENSORS}ensemble_scheduling {{{steps}\n}}\n'
    )
    return root
