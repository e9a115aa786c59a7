"""What the server and `sluice doctor` say of the GPUs, against nvidia-smi."""

import base64
import json
import subprocess
import sys
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from sluice.cli.gpus import GpuFacts
from tests.gpu import nvidia_smi
from tests.gpu.conftest import PATIENCE_S, RepositoryServer, ask_nvidia_smi
from tests.paths import ROOT

_MIB = 1 << 20
_HANDLE_BYTES = 64


@pytest.mark.gpu("GPU metrics equal nvidia-smi's")
def test_metrics_are_nvidia_smis(smi: list[nvidia_smi.Gpu], triton: RepositoryServer) -> None:
    assert smi
    differences = ["not asked yet"]
    until = time.monotonic() + PATIENCE_S
    while differences and time.monotonic() < until:
        # Other programs may change their memory between the two answers.
        differences = nvidia_smi.differences(ask_nvidia_smi(), triton.metrics())
        time.sleep(0.2)
    assert differences == []


@pytest.mark.gpu("memory that a program takes shows in the metrics")
def test_memory_shows_in_the_metrics(smi: list[nvidia_smi.Gpu], triton: RepositoryServer) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no CUDA")
    program = f"import torch; kept = torch.zeros({512 * _MIB}, dtype=torch.uint8, device='cuda:0'); print(1); input()"
    command = ["env", "CUDA_DEVICE_ORDER=PCI_BUS_ID", sys.executable, "-c", program]
    uuid = smi[0]["uuid"]
    before = nvidia_smi.value_of(triton.metrics(), "nv_gpu_memory_used_bytes", uuid)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        wait_for_memory(triton, uuid, before + 512 * _MIB)
        holder.communicate("\n")


def wait_for_memory(triton: RepositoryServer, uuid: str, expected: float) -> None:
    """Wait until that many bytes of a GPU are used."""
    until = time.monotonic() + PATIENCE_S
    while (used := nvidia_smi.value_of(triton.metrics(), "nv_gpu_memory_used_bytes", uuid)) < expected:
        assert time.monotonic() < until, f"{used} bytes used, expected {expected}"
        time.sleep(0.1)


@pytest.mark.gpu("`sluice doctor` names each GPU and the driver as nvidia-smi does")
def test_doctor_names_gpus_and_driver(smi: list[nvidia_smi.Gpu]) -> None:
    command = [sys.executable, "-m", "sluice.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    findings = {each["subject"]: each["text"] for each in json.loads(done.stdout)["findings"]}
    assert findings["driver"].startswith(smi[0]["driver_version"])
    for gpu in smi:
        assert findings[f"GPU {gpu['index']}"].startswith(gpu["name"])


@pytest.mark.gpu("CUDA shared memory is refused over {protocol} by name, and the client's memory stays as it was")
@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_cuda_shared_memory_is_refused(gpus: tuple[GpuFacts, ...], triton: RepositoryServer, protocol: str) -> None:
    try:
        from tritonclient.utils import cuda_shared_memory as cudashm
    except (ImportError, RuntimeError) as error:  # the second where cuda-python is missing
        pytest.skip(f"tritonclient's cuda_shared_memory cannot be imported: {error}")
    region = cudashm.create_shared_memory_region("region", 64, 0)
    try:
        values = np.arange(16, dtype=np.float32)
        cudashm.set_shared_memory_region(region, [values])
        handle = cudashm.get_raw_handle(region)
        assert len(base64.b64decode(handle)) == _HANDLE_BYTES
        address = triton.server.grpc_address if protocol == "gRPC" else triton.server.base_url.partition("//")[2]
        library = grpcclient if protocol == "gRPC" else httpclient
        with library.InferenceServerClient(address) as client:
            with pytest.raises(InferenceServerException, match="failed to register CUDA shared memory region"):
                client.register_cuda_shared_memory("region", handle, 0, 64)
            assert client.is_server_live()
        assert cudashm.get_contents_as_numpy(region, np.float32, [16]).tolist() == values.tolist()
    finally:
        cudashm.destroy_shared_memory_region(region)
