"""Instances run on the GPUs that `gpus` of their group names, and go over to the CPU where those are busy."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.cli.gpus import GpuFacts
from tests.gpu import nvidia_smi
from tests.gpu.conftest import RepositoryServer
from tests.gpu.models import ONNX_BYTES, ONNX_COLUMNS, ONNX_ROWS, configure, onnx_model, tensorrt_plan, write_place
from tests.gpu.test_machine import wait_for_memory

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
LONG_RUN = 30_000.0
"""Products that take a GPU a few seconds."""


def require_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no CUDA")


@pytest.mark.gpu("instances of the {backend} backend run on the GPU that `gpus` names")
@pytest.mark.parametrize("backend", ["pytorch", "python"])
def test_instances_are_where_gpus_says(gpus: tuple[GpuFacts, ...], triton: RepositoryServer, backend: str) -> None:
    if backend == "pytorch":
        require_torch()
    for gpu in {gpus[0].index, gpus[-1].index}:
        name = f"{backend}_{gpu}"
        write_place(triton.repository / name, backend, f"{{ kind: KIND_GPU gpus: [ {gpu} ] }}")
        triton.load(name)
        assert triton.infer(name, [1.0]) == [gpu]
        triton.unload(name)


@pytest.mark.gpu("instances of a GPU group without `gpus` are on every GPU")
def test_a_group_without_gpus_is_on_all(gpus: tuple[GpuFacts, ...], triton: RepositoryServer) -> None:
    require_torch()
    write_place(triton.repository / "everywhere", "pytorch", "{ kind: KIND_GPU }")
    triton.load("everywhere")
    seen = set()
    with ThreadPoolExecutor(2 * len(gpus)) as pool:
        for _ in range(20):
            seen |= {each[0] for each in pool.map(lambda _: triton.infer("everywhere", [500.0]), range(2 * len(gpus)))}
    triton.unload("everywhere")
    assert seen == {float(gpu.index) for gpu in gpus}


@pytest.mark.gpu("a free GPU instance runs a request, and an instance on the CPU does where the GPU is busy")
def test_the_cpu_takes_what_the_gpu_cannot(gpus: tuple[GpuFacts, ...], triton: RepositoryServer) -> None:
    require_torch()
    groups = ("{ count: 1 kind: KIND_CPU }", f"{{ count: 1 kind: KIND_GPU gpus: [ {gpus[0].index} ] }}")
    write_place(triton.repository / "both", "pytorch", *groups)
    triton.load("both")
    gpu = float(gpus[0].index)
    assert [triton.infer("both", [1.0]) for _ in range(8)] == 8 * [[gpu]]
    with ThreadPoolExecutor(1) as pool:
        long_run = pool.submit(triton.infer, "both", [LONG_RUN])
        during = []
        while not long_run.done() and [-1.0] not in during:
            during.append(triton.infer("both", [0.0]))
    assert long_run.result() == [gpu]
    assert [-1.0] in during
    assert triton.infer("both", [1.0]) == [gpu]
    triton.unload("both")


@pytest.mark.gpu("a model of the {backend} backend lies on the GPU that `gpus` names, and computes right")
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_weights_lie_where_gpus_says(
    gpus: tuple[GpuFacts, ...], smi: list[nvidia_smi.Gpu], triton: RepositoryServer, backend: str
) -> None:
    if backend == "onnxruntime":
        library = pytest.importorskip("onnxruntime")
        if "CUDAExecutionProvider" not in library.get_available_providers():
            pytest.skip("onnxruntime has no CUDA: pip install onnxruntime-gpu in place of onnxruntime")
    else:
        pytest.importorskip("tensorrt", reason="tensorrt is not installed: pip install '.[tensorrt]'")
    pytest.importorskip("onnx", reason="onnx is not installed")
    gpu = gpus[-1].index
    folder = triton.repository / f"sums_{backend}"
    configure(folder, backend, [f"{{ kind: KIND_GPU gpus: [ {gpu} ] }}"], (ONNX_ROWS, ONNX_COLUMNS))
    if backend == "onnxruntime":
        (folder / "1" / "model.onnx").write_bytes(onnx_model())
    else:
        (folder / "1" / "model.plan").write_bytes(tensorrt_plan(onnx_model()))
    uuid = next(each["uuid"] for each in smi if each["index"] == str(gpu))
    before = nvidia_smi.value_of(triton.metrics(), "nv_gpu_memory_used_bytes", uuid)
    triton.load(folder.name)
    wait_for_memory(triton, uuid, before + ONNX_BYTES)
    values = [1.0, 2.0, *([0.0] * (ONNX_ROWS - 2))]
    assert triton.infer(folder.name, values) == ONNX_COLUMNS * [3.0]
    triton.unload(folder.name)
