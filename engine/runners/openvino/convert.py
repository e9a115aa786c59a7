"""Converts checkpoints that our graphs do not support to an IR in the cache folder, once, by optimum-intel. `python -m
sluice.engine.runners.openvino.convert` is the process that runs optimum-intel's command, so that the engine does not
load torch. It ends when its standard input does, which is when the engine that started it is gone."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import IO

from sluice.engine.model_folder import read_json
from sluice.engine.models.config.config_file import ConfigFile
from sluice.errors import ErrorCode, SluiceError

logger = logging.getLogger(__name__)

_PACKAGE = "optimum-intel"
_WEIGHTS = ("*.safetensors", "*.bin")
_REPORT_S = 10.0
"""Seconds between log lines during a conversion."""
_SHOWN_LINES = 3


def can_convert() -> bool:
    """Return whether the extra `sluice[convert]` is installed."""
    return find_spec("optimum") is not None and find_spec("optimum.intel") is not None


def convert(directory: Path, quantization: str, folder: Path) -> Path:
    """Return the folder, inside `folder`, with the IR of the checkpoint in `directory`. It is made if it is missing.
    Raises UNIMPLEMENTED if optimum-intel cannot convert the checkpoint, UNAVAILABLE if the folder cannot be written."""
    converted = folder / _key(directory, quantization)
    if converted.is_dir():
        return converted
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{converted.name}.unfinished-", dir=folder))
    except OSError as error:
        message = f"the converted model cannot be written to {folder}: {error}; set cache_path to a folder with room"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="cache_path") from error
    try:
        _export(directory, quantization, unfinished)
        # Renamed at the end, so that a folder of that name is complete.
        unfinished.rename(converted)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return converted


def _key(directory: Path, quantization: str) -> str:
    """Return a key that changes with the checkpoint, the quantization and the converter."""
    files = sorted(path for pattern in (*_WEIGHTS, "config.json") for path in directory.glob(pattern))
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((version(_PACKAGE), stats)).encode()).hexdigest()
    return f"{digest[:16]}-{quantization}"


def _export(directory: Path, quantization: str, output: Path) -> None:
    started = time.monotonic()
    logger.info("converting %s with optimum-intel; this happens once, and takes minutes for a large model", directory)
    with tempfile.TemporaryFile("w+") as output_log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sluice.engine.runners.openvino.convert",
                *_arguments(directory, quantization, output),
            ],
            stdin=subprocess.PIPE,
            stdout=output_log,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                _wait(process, started)
            finally:
                process.kill()
        if process.returncode:
            message = f"optimum-intel cannot convert {directory}: {_last_lines(output_log)}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
    logger.info("converted in %.0f s: %s", time.monotonic() - started, output.parent)


def _wait(process: subprocess.Popen[bytes], started: float) -> None:
    while True:
        try:
            process.wait(_REPORT_S)
            return
        except subprocess.TimeoutExpired:
            logger.info("still converting, for %.0f s now", time.monotonic() - started)


def _arguments(directory: Path, quantization: str, output: Path) -> Iterator[str]:
    yield from ("export", "openvino", "--model", str(directory), "--task", "text-generation-with-past")
    yield from ("--disable-convert-tokenizer", "--weight-format", _weight_format(directory, quantization))
    if quantization == "int4":
        yield from ("--group-size-fallback", "adjust")
    yield str(output)


def _weight_format(directory: Path, quantization: str) -> str:
    """Return the format to store weights in, always given because optimum-intel compresses large models by default."""
    if quantization != "none":
        return quantization
    fields = ConfigFile(read_json(directory / "config.json"), directory / "config.json").fields
    stored = fields.get("dtype", fields.get("torch_dtype"))
    return "fp16" if stored in ("bfloat16", "float16") else "fp32"


def _last_lines(output_log: IO[str]) -> str:
    output_log.seek(0)
    lines = [line.strip() for line in output_log.read().splitlines() if line.strip()]
    return " / ".join(lines[-_SHOWN_LINES:]) or "it said nothing"


COMMAND = "optimum-cli"


def main() -> None:
    """Run `optimum-cli` with this process's arguments."""
    from optimum.commands.optimum_cli import main as optimum_cli

    Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = COMMAND
    optimum_cli()


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would then block the interpreter's exit
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
