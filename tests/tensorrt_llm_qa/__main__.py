"""Run the adapter over NVIDIA's Python modules: `python -m tests.tensorrt_llm_qa CHECKOUT --work FOLDER [PART ...]`.

CHECKOUT is a clone of github.com/NVIDIA/TensorRT-LLM, of which the folders tensorrt_llm and triton_backend are enough
(`git clone --filter=blob:none --sparse`); it is not changed. What needs a GPU or a compiled library is a stub, so that
this shows names, types, constraints, texts and rules, and nothing of kernels, speed or memory. It needs torch for CPUs
(`pip install torch==2.13.0`) beside the tests' own packages. Each part runs in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.stand_ins.paths import PATHS
from tests.tensorrt_llm_qa.loading import Checkout, Failure, Report, install

PARTS = {
    "modules": "loading.modules_load",
    "configuration": "configuration.settings_are_taken",
    "field-names": "configuration.names_are_told",
    "sampling-parameters": "requests.requests_are_taken",
    "runtime": "requests.runtime_answers",
    "schedulers": "schedulers.schedulers_agree",
    "texts": "sources.refusals_blame_the_client",
    "template": "sources.template_loads",
}
"""The function of each part, which takes the checkout, the folder for its files and the options."""
_WITHOUT_MODULES = ("texts", "template")
_TIMEOUT_S = 900.0
_MOST_SHOWN = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tensorrt_llm_qa", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--work", type=Path, required=True, help="folder for what the parts write")
    parser.add_argument("--fields", type=Path, help="lists of field names to compare with, in place of the adapter's")
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the random requests and traces that is tried"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args(argv)
    checkout = Checkout(given.checkout.resolve())
    if unknown := [*(each for each in given.parts if each not in PARTS)]:
        parser.error(f"there is no part {unknown[0]}; the parts are {', '.join(PARTS)}")
    if given.here:
        sys.stdout.write(json.dumps(asdict(_run_here(checkout, given))))
        return 0
    try:
        sys.stdout.write(f"TensorRT-LLM {checkout.version}\n\n")
    except (OSError, ValueError) as error:
        parser.error(f"{given.checkout} is no checkout of TensorRT-LLM: {error}")
    reports = {part: run_part(part, given) for part in given.parts or PARTS}
    for part, report in reports.items():
        outcome = "fail" if report.failures else "pass"
        sys.stdout.write(f"{part:<20} {outcome}  {report.num_passed:>6} passed {len(report.failures):>5} failed\n")
    for part, report in reports.items():
        more = [f"and {len(report.failures) - _MOST_SHOWN} more"] if len(report.failures) > _MOST_SHOWN else []
        for line in (*report.failures[:_MOST_SHOWN], *more, *(f"(note) {note}" for note in report.notes)):
            sys.stdout.write(f"{part}: {line}\n")
    return int(any(report.failures for report in reports.values()))


def run_part(part: str, given: argparse.Namespace) -> Report:
    """Run a part in a process of its own: NVIDIA's modules leave hooks and threads."""
    options = ["--work", str(given.work), "--share", str(given.share)]
    options += ["--fields", str(given.fields)] if given.fields else []
    path = os.pathsep.join(map(str, (ROOT, *PATHS[1:])))  # a torch of ours where there is none, and never the stand-in
    done = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt_llm_qa", str(given.checkout), part, "--here", *options],
        env={**os.environ, "PYTHONPATH": path},  # noqa: TID251 - the part needs PATH and more
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    try:
        return Report(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return Report(failures=[f"it ended with {done.returncode}: {done.stderr.strip()[-600:]}"])


def _run_here(checkout: Checkout, given: argparse.Namespace) -> Report:
    (part,) = given.parts
    given.work.mkdir(parents=True, exist_ok=True)
    if part not in _WITHOUT_MODULES:
        install(checkout)
    module, function = PARTS[part].split(".")
    try:
        run: Any = getattr(import_module(f"tests.tensorrt_llm_qa.{module}"), function)
        report: Report = run(checkout, given.work, given)
    except Failure as failure:
        report = Report(failures=[str(failure)])
    return report


if __name__ == "__main__":
    sys.exit(main())
