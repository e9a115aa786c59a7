"""The parts of the command, and what a part is told and writes."""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Value = float | int | str | bool


@dataclass(frozen=True, slots=True)
class Part:
    """A part. It is ended after `limit_s`; all of them together take about six minutes on an H200's machine."""

    name: str
    limit_s: int
    claim: str
    """A sentence's subject for `docs/gpus.md` and the table on the screen."""


PARTS = (  # in order of worth: a run that is cut short has the first
    Part("versions", 30, "Python, torch, triton, the driver and the GPU"),
    Part("ceilings", 60, "what the GPU reaches: memory bandwidth, products, launches"),
    Part("kernels", 90, "our Triton kernels against float64"),
    Part("goldens", 90, "the tokens of 55 model families, with and without CUDA graphs"),
    Part("decoder", 120, "steps of an 8B: decode 1 to 256, prefill 512 to 8,192"),
    Part("executor", 120, "the executor alone: 0.6B, and an 8B whose cache is too small"),
    Part("server", 150, "`sluice serve` under HTTP load at 1, 32 and 256"),
    Part("peer", 90, "transformers' continuous batching on the same device"),
    Part("metrics", 40, "GPU metrics against nvidia-smi"),
    Part("profile", 40, "kernels of one decode step, by time"),
)


class Skipped(Exception):
    """A part that cannot be measured here. The message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments of a part. `out` has its results and those of earlier parts, `work` files that parts share."""

    device: str
    is_tiny: bool
    out: Path
    work: Path


@dataclass
class Notes:
    """The figures of a part. Each is written and printed at once, so that a part that is ended keeps those before."""

    file: Path
    result: dict[str, Any] = field(default_factory=lambda: {"figures": {}})
    started: float = field(default_factory=time.perf_counter)

    def note(self, name: str, /, **values: Value) -> None:
        self.result["figures"].setdefault(name, {}).update(values)
        self.write()
        text = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"{time.perf_counter() - self.started:6.1f} s  {name}: {text}", flush=True)

    def write(self) -> None:
        self.result["seconds"] = round(time.perf_counter() - self.started, 1)
        self.file.write_text(json.dumps(self.result, indent=1))


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures_of(setting: Setting, part: str) -> dict[str, dict[str, Any]]:
    """Return the figures that an earlier part has written, none where it has not run."""
    file = setting.out / f"{part}.json"
    figures: dict[str, dict[str, Any]] = json.loads(file.read_text())["figures"] if file.is_file() else {}
    return figures


def outcome(result: dict[str, Any]) -> str:
    """Return how a part ended, on one line."""
    if "error" in result:
        return f"FAILED: {result['error']}"
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    return f"{len(result['figures'])} figures"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, with which the CPU can be the device")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="results (%(default)s)")
