"""Small models that say where they run, and the configurations that place them."""

from collections.abc import Sequence
from pathlib import Path

PLACE_NAMES = {"pytorch": "model.pt", "python": "model.py"}
"""Files of the models that answer with the number of their GPU, -1 on the CPU, by backend."""
ONNX_ROWS, ONNX_COLUMNS = 4096, 8192
ONNX_BYTES = 4 * ONNX_ROWS * ONNX_COLUMNS
"""Size of the weights of the model for onnxruntime and TensorRT: its place on a GPU shows in the GPU's memory."""
_PYTHON = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        is_on_gpu = args["model_instance_kind"] == "GPU"
        self.device = int(args["model_instance_device_id"]) if is_on_gpu else -1

    def execute(self, requests):
        output = pb_utils.Tensor("OUTPUT__0", np.array([[self.device]], np.float32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""


def configure(folder: Path, backend: str, groups: Sequence[str], columns: tuple[int, int] = (1, 1)) -> None:
    """Write config.pbtxt: one row of FP32 values in and one out, with these instance groups."""
    tensors = "".join(
        f'{kind} [ {{ name: "{kind.upper()}__0" data_type: TYPE_FP32 dims: [ 1, {size} ] }} ]\n'
        for kind, size in zip(("input", "output"), columns, strict=True)
    )
    text = f'backend: "{backend}"\nmax_batch_size: 0\n{tensors}instance_group [ {", ".join(groups)} ]\n'
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)


def write_place(folder: Path, backend: str, *groups: str) -> None:
    """Write a model that answers with the number of its GPU. Its input is how many large products it computes first."""
    configure(folder, backend, groups)
    if backend == "python":
        (folder / "1" / "model.py").write_text(_PYTHON)
        return
    import torch  # the tests that need it skip where it is missing

    class Place(torch.nn.Module):  # type: ignore[misc]
        def forward(self, count: torch.Tensor) -> torch.Tensor:
            product = torch.zeros(2048, 2048, device=count.device)
            for _ in range(int(count.max().item())):
                product = torch.matmul(product, product)
            return torch.full_like(count, count.get_device()) + product.sum()

    torch.jit.script(Place()).save(folder / "1" / "model.pt")


def onnx_model() -> bytes:
    """Return a model that adds up its input, ONNX_COLUMNS times: a product with a matrix of ones."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.ones((ONNX_ROWS, ONNX_COLUMNS), np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["INPUT__0", "weights"], ["OUTPUT__0"])],
        "sums",
        [helper.make_tensor_value_info("INPUT__0", TensorProto.FLOAT, [1, ONNX_ROWS])],
        [helper.make_tensor_value_info("OUTPUT__0", TensorProto.FLOAT, [1, ONNX_COLUMNS])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def tensorrt_plan(model: bytes) -> bytes:
    """Compile an ONNX model for this machine's GPU."""
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model), [str(parser.get_error(index)) for index in range(parser.num_errors)]
    return bytes(builder.build_serialized_network(network, builder.create_builder_config()))
