"""`python -m benchmarks.gpu`: run the parts one after the other, each in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.aims import print_aims
from benchmarks.gpu.parts import PARTS, Part, add_options, outcome

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "wheels"
"""The kit's folder of them."""
LIMIT_S = 540
PATIENCE = 3
"""Factor of the parts' limits with small shapes, which run on machines of any speed."""
LEAST_S = 5
"""A part that has less time than this is not started."""


def main(argv: list[str]) -> int:
    """Run the named parts, print a line for each, and write `summary.json` anew after each. Returns 1 if one failed."""
    arguments = _parser().parse_args(argv)
    names = arguments.parts.split(",") if arguments.parts else [part.name for part in PARTS]
    if unknown := set(names) - {part.name for part in PARTS}:
        sys.stderr.write(f"benchmarks.gpu: no part {', '.join(sorted(unknown))}\n")
        return 2
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": arguments.device,
        "is_tiny": arguments.tiny,
        "parts": {},
    }
    until = time.monotonic() + arguments.limit
    with installed_wheels(arguments.wheels) as environment, tempfile.TemporaryDirectory(prefix="sluice-gpu-") as work:
        for part in (part for part in PARTS if part.name in names):
            limit_s = min(part.limit_s * (PATIENCE if arguments.tiny else 1), until - time.monotonic())
            result = _run(part.name, _command(part, arguments, work), arguments.out, environment, limit_s)
            summary["parts"][part.name] = result
            (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
            print(f"{part.name:10} {result['seconds']:6.1f} s  {outcome(result)}", flush=True)
    print_aims(summary)
    print(f"written to {arguments.out / 'summary.json'}")
    return int(any("error" in result for result in summary["parts"].values()))


def _run(name: str, command: list[str], out: Path, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run a part. Returns what it has written, with the reason where it was ended before it was through."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    if limit_s < LEAST_S:
        return {"figures": {}, "seconds": 0.0, "skipped": "the time was over"}
    began = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        status = _wait(command, log.fileno(), environment, limit_s)
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"figures": {}}
    if not result.pop("is_whole", False) and "error" not in result:
        ending = f"it took more than {limit_s:.0f} s" if status is None else f"its process ended with {status}"
        result["error"] = f"{ending}; see {name}.log"
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def _wait(command: list[str], output: int, environment: dict[str, str], limit_s: float) -> int | None:
    """Run a command to its end, None if it takes longer. Whatever it has started ends with it."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(part: Part, arguments: argparse.Namespace, work: str) -> list[str]:
    options = [f"--device={arguments.device}", f"--out={arguments.out}", f"--work={work}"]
    tiny = ["--tiny"] if arguments.tiny else []
    return [sys.executable, "-m", "benchmarks.gpu.part", part.name, *options, *tiny]


@contextmanager
def installed_wheels(folder: Path | None) -> Iterator[dict[str, str]]:
    """Install the wheels of a folder for this run alone, and yield the environment in which they are found."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # noqa: TID251 - for the parts' processes
    with tempfile.TemporaryDirectory(prefix="sluice-wheels-") as target:
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        if folder is not None:
            options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
            wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
            install = [sys.executable, "-m", "pip", "install", *options, f"--target={target}", *wheels]
            subprocess.run(install, check=True)
            paths.insert(0, target)
        yield {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {part.name:10} {part.claim}" for part in PARTS)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=f"Measure Sluice on this machine's GPU. Parts, in order of worth:\n\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--parts", default="", metavar="A,B", help="these parts alone")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=WHEELS if WHEELS.is_dir() else None,
        metavar="FOLDER",
        help="wheels that this Python lacks, installed for this run alone; default: those of a kit",
    )
    parser.add_argument("--limit", type=int, default=LIMIT_S, metavar="S", help="seconds for all parts (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
