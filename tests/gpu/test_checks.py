"""The checks of `make test-gpu` themselves, on stand-ins: what they would say on a machine with GPUs."""

from pathlib import Path

import pytest

from tests.gpu.conftest import RepositoryServer
from tests.gpu.models import ONNX_COLUMNS, ONNX_ROWS, configure, onnx_model, write_place
from tests.gpu.test_language_models import clear_tokens, ids
from tests.server_process import running_command
from tests.vllm.conftest import PROMPTS, RILL, complete


# torch says of TorchScript that it is deprecated, at each of its functions.
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_models_answer_on_a_machine_without_a_gpu(empty_server: RepositoryServer) -> None:
    pytest.importorskip("torch")
    repository = empty_server.repository
    for backend in ("pytorch", "python"):
        write_place(repository / f"cpu_{backend}", backend, "{ count: 2 kind: KIND_CPU }")
        empty_server.load(f"cpu_{backend}")
        assert empty_server.infer(f"cpu_{backend}", [1.0]) == [-1.0]
    configure(repository / "cpu_sums", "onnxruntime", ["{ kind: KIND_CPU }"], (ONNX_ROWS, ONNX_COLUMNS))
    (repository / "cpu_sums" / "1" / "model.onnx").write_bytes(onnx_model())
    empty_server.load("cpu_sums")
    assert empty_server.infer("cpu_sums", [1.0, 2.0, *([0.0] * (ONNX_ROWS - 2))]) == ONNX_COLUMNS * [3.0]


@pytest.mark.torch
def test_clear_tokens_are_our_executors(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running_command(tmp_path / "log", str(RILL), "--dtype=f32") as server:
        server.wait_ready()
        expected = clear_tokens(PROMPTS[0], 0.01)
        assert len(expected) > 4
        assert ids(complete(server, PROMPTS[0], max_tokens=len(expected))) == expected
