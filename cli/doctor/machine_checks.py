"""Checks of the machine alone. Pure: from facts to findings."""

from collections.abc import Iterator

from sluice.cli.doctor.facts import InstalledLibraries, MachineFacts
from sluice.cli.doctor.findings import DoctorFinding, fail, note, ok, warn
from sluice.cli.gpus import ComputeCapability, GpuFacts, NvidiaDriver
from sluice.cli.terminal import format_size
from sluice.engine.config import Runtime
from sluice.engine.runtimes import BUNDLED, RUNTIMES

_GPU_RUNTIMES = tuple(spec for spec in RUNTIMES.values() if spec.min_capability)
_OLDEST_SUPPORTED = min(
    (ComputeCapability(*spec.min_capability), spec.title) for spec in _GPU_RUNTIMES if spec.min_capability
)
"""The oldest compute capability that any runtime supports, and the title of that runtime."""
MIN_DISK_BYTES = 2 << 30
MIN_FREE_SHARE = 0.7
"""Share of a GPU's memory. Where less is free, another program holds some of it."""


def check_machine(machine: MachineFacts, runtime: Runtime) -> Iterator[DoctorFinding]:
    """Check CPU, disk, ports, GPUs and libraries. `runtime` is the one requested, AUTO for whichever fits."""
    yield ok(
        "CPU",
        f"{machine.num_cores} cores{_dtypes(machine.cpu_dtypes)}; {format_size(machine.memory_available_bytes)} of "
        f"memory free; Python {machine.python_version}",
    )
    yield from _check_bundled(machine, runtime)
    yield from _check_disk(machine)
    yield from _check_ports(machine)
    yield from _check_driver(machine.driver, runtime)
    yield from _check_libraries(machine.libraries, machine.driver, runtime)
    yield from _check_environments(machine, runtime)


def _dtypes(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    return ", bf16 and f32" if "BF16" in names else ", f32 only (no bf16: about half as fast)"


def _check_bundled(machine: MachineFacts, runtime: Runtime) -> Iterator[DoctorFinding]:
    """Check that the bundled runtime can be imported. It must be where it alone is left to serve language models."""
    if not machine.bundled_problem:
        return
    is_needed = runtime is BUNDLED.runtime or (runtime is Runtime.AUTO and not machine.driver.gpus)
    found = f"it cannot be imported: {machine.bundled_problem}"
    remedy = f"pip install --force-reinstall {BUNDLED.distributions[0]}, or serve by --runtime torch"
    yield fail(BUNDLED.title, found, remedy) if is_needed else note(BUNDLED.title, found)


def _check_disk(machine: MachineFacts) -> Iterator[DoctorFinding]:
    free = f"{format_size(machine.disk_free_bytes)} free at {machine.cache_folder}"
    if machine.disk_free_bytes < MIN_DISK_BYTES:
        yield warn("disk", f"{free}, where compressed weights are kept", "free some, or give --cache-path another disk")
    else:
        yield ok("disk", free)


def _check_ports(machine: MachineFacts) -> Iterator[DoctorFinding]:
    for port in machine.busy_ports:
        yield warn(
            "ports",
            f"{port} is taken; a server that runs already, perhaps",
            "stop that, or give --http-port, --grpc-port or --metrics-port another",
        )


def _check_driver(driver: NvidiaDriver, runtime: Runtime) -> Iterator[DoctorFinding]:
    if not driver.gpus:
        text = f"no NVIDIA GPU: {driver.reason}"
        spec = RUNTIMES.get(runtime, BUNDLED)
        if spec.min_capability is not None:
            yield fail("GPU", text, f"{spec.title} needs one; --runtime {BUNDLED.runtime} serves on {BUNDLED.devices}")
        else:
            yield note("GPU", f"{text}. Language models run on {BUNDLED.devices}, by {spec.title}")
        return
    cuda = ".".join(map(str, driver.cuda_version or ()))
    yield ok("driver", f"{driver.version}, runs CUDA up to {cuda}")
    for gpu in driver.gpus:
        yield from _check_gpu(gpu)


def _check_gpu(gpu: GpuFacts) -> Iterator[DoctorFinding]:
    subject = f"GPU {gpu.index}"
    text = (
        f"{gpu.name}, compute capability {gpu.capability or 'unknown'}, {format_size(gpu.memory_free_bytes)} of "
        f"{format_size(gpu.memory_total_bytes)} free"
    )
    oldest, title = _OLDEST_SUPPORTED
    if gpu.capability is not None and gpu.capability < oldest:
        remedy = f"serve by --runtime {BUNDLED.runtime}, or use a newer GPU"
        yield fail(subject, f"{text}; {title} begins at {oldest}", remedy)
    elif gpu.memory_free_bytes < MIN_FREE_SHARE * gpu.memory_total_bytes:
        remedy = "end them, or expect a smaller KV cache: it takes a share of what is free"
        yield warn(subject, f"{text}; {gpu.num_processes} processes hold the rest", remedy)
    else:
        yield ok(subject, text)
    if gpu.is_partitioned:
        yield note(subject, "MIG is on: CUDA shows its slices, whose memory is less than the GPU's")


def _check_libraries(libraries: InstalledLibraries, driver: NvidiaDriver, runtime: Runtime) -> Iterator[DoctorFinding]:
    installed = ", ".join(f"{name} {version}" for name, version in libraries.versions.items())
    yield ok("libraries", installed)
    present = [spec.title for spec in _GPU_RUNTIMES if spec.distributions[0] in libraries.versions]
    for spec in _GPU_RUNTIMES:
        remedy = f"{spec.remedy}; the gpu image of docker-compose.yml has it so"
        if runtime is spec.runtime and spec.title not in present:
            yield fail(spec.title, "it is asked for and not installed", remedy)
        elif driver.gpus and not present and libraries.torch_cuda is None:
            yield warn(spec.title, "not installed, so the GPUs stay idle and the CPU does the work", remedy)
    if not present:
        return
    if "torch" in libraries.versions and libraries.torch_cuda is None:
        titles = " and ".join(present)
        yield fail(
            "torch",
            f"{libraries.versions['torch']} is built without CUDA, which {titles} needs",
            f"install {titles} into an environment of its own, and name that one's Python (--engine-python)",
        )
    if libraries.torch_cuda is not None and driver.cuda_version is not None:
        yield from _check_cuda(libraries.torch_cuda, driver.cuda_version, driver.version)


def _check_environments(machine: MachineFacts, runtime: Runtime) -> Iterator[DoctorFinding]:
    for name, (python, version) in machine.environments.items():
        spec = RUNTIMES[name]
        if version:
            yield ok(spec.title, f"{version}, in the environment of {python}")
        else:
            remedy = f"sluice runtime install {name} --force"
            yield fail(spec.title, f"the environment of {python} does not hold it", remedy)
    wanted = RUNTIMES.get(runtime, BUNDLED)
    is_checked = wanted in _GPU_RUNTIMES or wanted.runtime in machine.environments or not wanted.library
    if not is_checked and not {*wanted.distributions[:-1]} & machine.libraries.versions.keys():
        yield fail(wanted.title, "it is asked for and not installed", wanted.remedy)


def _check_cuda(built_for: tuple[int, int], supported: tuple[int, int], driver_version: str) -> Iterator[DoctorFinding]:
    """Compare the CUDA that the libraries are built for with the newest that the driver supports.

    A driver runs every CUDA up to its own, and newer minor versions of the same major version in part (NVIDIA's minor
    version compatibility).
    """
    text = (
        f"the libraries are built for CUDA {built_for[0]}.{built_for[1]}, driver {driver_version} runs up to "
        f"{supported[0]}.{supported[1]}"
    )
    remedy = "install a newer driver, or an image that is made for this one"
    if built_for[0] > supported[0]:
        yield fail("CUDA", text, remedy)
    elif built_for > supported:
        yield warn("CUDA", f"{text}: what is compiled at run time will fail", remedy)
    else:
        yield ok("CUDA", text)
