"""The state of a thousand sequences at once: whether every answer is right, and the rate.

Each model adds up its inputs. Every answer is compared with the sum that the client computes.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import uvloop

from benchmarks.figures import Figure, Target
from sluice.serving.backend import BackendContext
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest, SequenceFlag
from sluice.serving.tensors.tensor import Tensor

NUM_SEQUENCES = 1_000
NUM_REQUESTS = 100_000
SEED = 5

_STRATEGIES = {
    "direct": ("direct { }", 512),
    "oldest": (f"oldest {{ max_candidate_sequences: {NUM_SEQUENCES} }}", 64),
}
"""Strategies by name: (configuration, `max_batch_size`). Two instances have a slot for every sequence."""
_ONNX = """
backend: "onnxruntime"
sequence_batching {{
  {strategy}
  state {{ input_name: "before" output_name: "after" data_type: TYPE_INT64 dims: [ 1 ] }}
}}
"""
_PYTHON = """
backend: "python"
sequence_batching {{
  {strategy}
  control_input {{ name: "start" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }}
  control_input {{ name: "end" control {{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }} }}
  control_input {{ name: "ready" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} }}
  control_input {{ name: "id" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} }}
}}
"""
_CODE = """\
import numpy as np
import triton_python_backend_utils as pb_utils


def number(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        sums = [self.add(request) if number(request, "ready") else 0 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[each]], np.int64))]) for each in sums]

    def add(self, request):
        key = number(request, "id")
        total = number(request, "x") + (0 if number(request, "start") else self.sums[key])
        self.sums[key] = total
        if number(request, "end"):
            del self.sums[key]
        return total
"""


@dataclass(slots=True)
class AnswerCounts:
    """Counts of the answers of one model."""

    num_right: int = 0
    num_wrong: int = 0


def measure(out: Path, num_sequences: int = NUM_SEQUENCES, num_requests: int = NUM_REQUESTS) -> list[Figure]:
    """Measure answers and rate for each strategy, with an ONNX model's implicit state and a Python model's ids."""
    folder = out.resolve() / "triton" / "sequences"
    for name, (strategy, max_batch_size) in _STRATEGIES.items():
        _write(folder / f"onnx_{name}", _ONNX.format(strategy=strategy), max_batch_size, "model.onnx", _sums())
        _write(folder / f"python_{name}", _PYTHON.format(strategy=strategy), max_batch_size, "model.py", _CODE.encode())
    return uvloop.run(_measure(folder, num_sequences, num_requests))


async def _measure(folder: Path, num_sequences: int, num_requests: int) -> list[Figure]:
    repository = ModelRepository([folder], ControlMode.NONE, BackendContext)
    await repository.start()
    try:
        return [
            figure
            for backend, strategy in itertools.product(("onnx", "python"), _STRATEGIES)
            for figure in await _figures(
                repository.find(f"{backend}_{strategy}"), f"{backend}, {strategy}", num_sequences, num_requests
            )
        ]
    finally:
        await repository.close()


async def _figures(model: Model, subject: str, num_sequences: int, num_requests: int) -> list[Figure]:
    started = perf_counter()
    counts = await _add_up(model, num_sequences, num_requests)
    elapsed = perf_counter() - started
    return [
        Figure("sequences: right answers", subject, "", (counts.num_right,), Target(num_requests, is_ceiling=False)),
        Figure("sequences: wrong answers", subject, "", (counts.num_wrong,), Target(0)),
        Figure("sequences: rate", subject, "requests/s", (num_requests / elapsed,)),
    ]


async def _add_up(model: Model, num_sequences: int, num_requests: int) -> AnswerCounts:
    """Run all sequences at once, half with numbers as ids and half with strings, of random lengths."""
    rng = random.Random(SEED)
    counts = AnswerCounts()
    cuts = sorted(rng.sample(range(1, num_requests), num_sequences - 1))
    lengths = [end - begin for begin, end in itertools.pairwise([0, *cuts, num_requests])]
    ids = [number if number % 2 else f"sequence {number}" for number in range(1, num_sequences + 1)]
    await asyncio.gather(
        *(
            _add_up_one(model, id, length, random.Random(rng.random()), counts)
            for id, length in zip(ids, lengths, strict=True)
        )
    )
    return counts


async def _add_up_one(model: Model, id: int | str, length: int, rng: random.Random, counts: AnswerCounts) -> None:
    total = 0
    for index in range(length):
        value = rng.randint(-1_000_000, 1_000_000)
        total += value
        flags = SequenceFlag.START if index == 0 else SequenceFlag.NONE
        if index == length - 1:
            flags |= SequenceFlag.END
        x = Tensor.of("x", np.array([[value]], np.int64))
        response = await infer_one(model, InferRequest({"x": x}, correlation_id=id, sequence=flags))
        if response.outputs[0].array.item() == total:
            counts.num_right += 1
        else:
            counts.num_wrong += 1


def _write(folder: Path, config: str, max_batch_size: int, file: str, content: bytes) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / file).write_bytes(content)
    (folder / "config.pbtxt").write_text(
        f"""name: "{folder.name}" max_batch_size: {max_batch_size}
input {{ name: "x" data_type: TYPE_INT64 dims: [ 1 ] }}
output {{ name: "y" data_type: TYPE_INT64 dims: [ 1 ] }}
instance_group {{ count: 2 }}
{config}"""
    )


def _sums() -> bytes:
    from onnx import TensorProto, helper

    def value(name: str) -> object:
        return helper.make_tensor_value_info(name, TensorProto.INT64, ["n", 1])

    nodes = [helper.make_node("Add", ["x", "before"], ["after"]), helper.make_node("Identity", ["after"], ["y"])]
    graph = helper.make_graph(nodes, "sums", [value("x"), value("before")], [value("y"), value("after")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())
