"""What is to be said of the machine alone. Pure: from facts to findings."""

from collections.abc import Iterator

from cli.doctor.facts import Capability, Gpu, Gpus, Libraries, Machine
from cli.doctor.findings import Finding, fail, note, ok, warn
from cli.doctor.units import gib
from engine.config import Runtime
from engine.runtimes import RUNTIMES

OLDEST_CAPABILITY = Capability(8, 0)
"""Ampere: TensorRT-LLM's list of supported hardware begins there."""
MIN_DISK_BYTES = 2 << 30
MIN_FREE_SHARE = 0.7
"""Of a GPU's memory: less is free where another program holds some of it."""


def check_machine(machine: Machine, runtime: Runtime) -> Iterator[Finding]:
    """`runtime` is what is asked for; AUTO for whatever fits."""
    dtypes = "bf16 and f32" if "BF16" in machine.cpu_dtypes else "f32 only (no bf16: about half as fast)"
    yield ok(
        "CPU",
        f"{machine.num_cores} cores, {dtypes}; {gib(machine.memory_available_bytes)} of memory free; "
        f"Python {machine.python_version}",
    )
    yield from _check_disk(machine)
    yield from _check_ports(machine)
    yield from _check_gpus(machine.gpus, runtime)
    yield from _check_libraries(machine.libraries, machine.gpus, runtime)


def _check_disk(machine: Machine) -> Iterator[Finding]:
    free = f"{gib(machine.disk_free_bytes)} free at {machine.cache_folder}"
    if machine.disk_free_bytes < MIN_DISK_BYTES:
        yield warn("disk", f"{free}, where compressed weights are kept", "free some, or give --cache-path another disk")
    else:
        yield ok("disk", free)


def _check_ports(machine: Machine) -> Iterator[Finding]:
    for port in machine.busy_ports:
        yield warn(
            "ports",
            f"{port} is taken; a server that runs already, perhaps",
            "stop that, or give --http-port, --grpc-port or --metrics-port another",
        )


def _check_gpus(gpus: Gpus, runtime: Runtime) -> Iterator[Finding]:
    if not gpus.gpus:
        text = f"no NVIDIA GPU: {gpus.reason}"
        if runtime is Runtime.TENSORRT_LLM:
            yield fail("GPU", text, "TensorRT-LLM needs one; --runtime openvino serves on the CPU")
        else:
            yield note("GPU", f"{text}. Language models run on the CPU, by OpenVINO")
        return
    cuda = ".".join(map(str, gpus.cuda_version or ()))
    yield ok("driver", f"{gpus.driver_version}, runs CUDA up to {cuda}")
    for gpu in gpus.gpus:
        yield from _check_gpu(gpu)


def _check_gpu(gpu: Gpu) -> Iterator[Finding]:
    subject = f"GPU {gpu.index}"
    text = (
        f"{gpu.name}, compute capability {gpu.capability or 'unknown'}, {gib(gpu.memory_free_bytes)} of "
        f"{gib(gpu.memory_total_bytes)} free"
    )
    if gpu.capability is not None and gpu.capability < OLDEST_CAPABILITY:
        remedy = "serve by --runtime openvino, or use an Ampere GPU or a newer one"
        yield fail(subject, f"{text}; TensorRT-LLM begins at {OLDEST_CAPABILITY}", remedy)
    elif gpu.memory_free_bytes < MIN_FREE_SHARE * gpu.memory_total_bytes:
        remedy = "end them, or expect a smaller KV cache: it takes a share of what is free"
        yield warn(subject, f"{text}; {gpu.num_processes} processes hold the rest", remedy)
    else:
        yield ok(subject, text)
    if gpu.is_partitioned:
        yield note(subject, "MIG is on: CUDA shows its slices, whose memory is less than the GPU's")


def _check_libraries(libraries: Libraries, gpus: Gpus, runtime: Runtime) -> Iterator[Finding]:
    installed = ", ".join(f"{name} {version}" for name, version in libraries.versions.items())
    yield ok("libraries", installed)
    if "tensorrt-llm" not in libraries.versions:
        remedy = f"{RUNTIMES[Runtime.TENSORRT_LLM].remedy}; the gpu image of docker-compose.yml has it so"
        if runtime is Runtime.TENSORRT_LLM:
            yield fail("TensorRT-LLM", "it is asked for and not installed", remedy)
        elif gpus.gpus:
            yield warn("TensorRT-LLM", "not installed, so the GPUs stay idle and the CPU does the work", remedy)
        return
    if "torch" in libraries.versions and libraries.torch_cuda is None:
        yield fail(
            "torch",
            f"{libraries.versions['torch']} is built without CUDA, which TensorRT-LLM needs",
            "install TensorRT-LLM into an environment of its own, and name that one's Python (--engine-python)",
        )
    if libraries.torch_cuda is not None and gpus.cuda_version is not None:
        yield from _check_cuda(libraries.torch_cuda, gpus)


def _check_cuda(wanted: tuple[int, int], gpus: Gpus) -> Iterator[Finding]:
    """A driver runs every CUDA up to its own, and newer minors of the same major with gaps (NVIDIA's compatibility)."""
    assert gpus.cuda_version is not None
    text = f"the libraries are built for CUDA {wanted[0]}.{wanted[1]}, driver {gpus.driver_version} runs up to " + (
        ".".join(map(str, gpus.cuda_version))
    )
    remedy = "install a newer driver, or an image that is made for this one"
    if wanted[0] > gpus.cuda_version[0]:
        yield fail("CUDA", text, remedy)
    elif wanted > gpus.cuda_version:
        yield warn("CUDA", f"{text}: what is compiled at run time will fail", remedy)
    else:
        yield ok("CUDA", text)
