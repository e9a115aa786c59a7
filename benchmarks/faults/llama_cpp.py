"""llama.cpp's server, built from the sources that llama-cpp-python's package has, with the model as a GGUF file."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.faults.adapters import IGNORE_EOS
from benchmarks.faults.server import MODEL, Adapter, Counters, Launch
from benchmarks.figures import BenchmarkError, ReportProgress

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
BUILD_LIMIT_S = 7200.0
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
}


def llama_cpp(checkpoint: Path, folder: Path, report: ReportProgress) -> Adapter:
    """Return llama.cpp's server, which is one process. Its slots share the cache, as sequences do elsewhere."""
    home = folder / "envs" / "llama.cpp"
    server = _built(home, report)
    model = _converted(checkpoint, folder / "models", home / "source")

    def command(launch: Launch) -> list[str | Path]:
        limits = launch.limits
        num_tokens = limits.cache_tokens or limits.num_seqs * limits.max_model_len
        sizes = ("--ctx-size", str(num_tokens), "--parallel", str(limits.num_seqs), "--kv-unified")
        served = ("--model", model, "--alias", MODEL, "--host", "127.0.0.1", "--port", str(launch.port))
        types = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--metrics")
        return [server, *served, *sizes, *types]

    return Adapter(
        key="llama.cpp",
        name="llama.cpp",
        version=_version(server),
        command=command,
        counters=Counters(running="llamacpp:requests_processing"),  # it counts the tokens of finished requests alone
        fields=IGNORE_EOS,
    )


def _built(home: Path, report: ReportProgress) -> Path:
    """Return the server's file, which is built once."""
    server = home / "build" / "bin" / "llama-server"
    if server.is_file():
        return server
    report(f"building llama.cpp's server of {PACKAGE} {VERSION} in {home}, once; it takes 10 minutes or more")
    source = _unpacked(home)
    build = home / "build"
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    _run("cmake", "-G", "Ninja", "-S", source / "vendor" / "llama.cpp", "-B", build, *options)
    _run("cmake", "--build", build, "--target", "llama-server")
    return server


def _unpacked(home: Path) -> Path:
    source = home / "source"
    if source.is_dir():
        return source
    home.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "--dest", home)
    unfinished = home / "source.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
        archive.extractall(unfinished, filter="data")
    next(unfinished.iterdir()).rename(source)
    return source


def _converted(checkpoint: Path, folder: Path, source: Path) -> Path:
    """Return the checkpoint as a GGUF file, which is written once."""
    file = folder / f"{checkpoint.name}.gguf"
    if not file.is_file():
        library = source / "vendor" / "llama.cpp" / "gguf-py"
        script = Path(__file__).with_name("gguf_worker.py")
        unfinished = file.with_suffix(".unfinished")
        _run("env", f"PYTHONPATH={library}", sys.executable, script, checkpoint, unfinished)
        unfinished.rename(file)
    return file


def _version(server: Path) -> str:
    """Return the build's number as its package has it: the sources have no history."""
    assert os.access(server, os.X_OK)
    return f"({PACKAGE} {VERSION})"


def _run(*command: str | Path) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    if process.returncode:
        last_words = " ".join((process.stderr or process.stdout).strip().splitlines()[-3:])
        raise BenchmarkError(f"{' '.join(map(str, command[:4]))} ... failed: {last_words}")
