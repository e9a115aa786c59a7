"""Run Triton's own QA against Sluice: `python -m tests.triton_qa CHECKOUT --work FOLDER [SUITE ...]`.

CHECKOUT is a checkout of github.com/triton-inference-server/server, which is not changed. The suites' own test.sh run
in a copy in FOLDER, with absolute paths moved there; the checkout's generators make the models. It needs Linux,
`unshare`, `ip` and the packages onnx, sseclient-py and prettytable. The outcomes go to
tests/data/triton_qa/outcomes.json, from which `make docs` makes the table in docs/triton-compatibility.md.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.paths import DATA
from tests.triton_qa.reasons import CANNOT_RUN, DIFFERENT, find_reason
from tests.triton_qa.running import FAILED, NOT_RUN, PASSED, Outcome, read_outcomes, record_of, run_suite
from tests.triton_qa.workspace import Workspace, prepare

OUTCOMES = DATA / "triton_qa" / "outcomes.json"
_SUITE_TIMEOUT_S = 1500
_NOT_REACHED = "the suite does not start them, or not in its time"
_BACKENDS = {"BACKENDS": "onnx"}
"""Most suites repeat themselves for each runtime that this variable names."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.triton_qa", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("suites", nargs="*", help="default: those of the last outcomes")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--python-backend", type=Path, help="a checkout of the Python backend, for its examples")
    parser.add_argument("--keep", action="store_true", help="run in the workspace that an earlier run prepared")
    parser.add_argument("--timeout-s", type=float, default=_SUITE_TIMEOUT_S, help="longest run of one suite")
    given = parser.parse_intermixed_args()
    root = given.work.resolve()
    workspace = Workspace(root) if given.keep else prepare(given.checkout, given.python_backend, root)
    record_of(workspace, "").parent.mkdir(exist_ok=True)
    rows = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
    for suite in given.suites or sorted({file.partition("/")[0] for file in rows}):
        run_suite(workspace, suite, _BACKENDS, given.timeout_s)
        for file, outcomes in read_outcomes(workspace, suite).items():
            rows[f"{suite}/{file}"] = _count(f"{suite}/{file}", outcomes)
        OUTCOMES.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _count(file: str, outcomes: list[Outcome]) -> dict[str, object]:
    """Return a file's numbers of tests by what became of them, and the reasons for those that did not pass."""
    counts = {PASSED: 0, FAILED: 0, NOT_RUN: 0}
    why: dict[str, None] = {}
    for outcome in outcomes:
        test = f"{file}::{outcome.name}"
        state = outcome.state
        reason = None if state == PASSED else find_reason(CANNOT_RUN, test)
        if reason is not None:
            state = NOT_RUN
        counts[state] += 1
        if state != PASSED:
            why[reason or (find_reason(DIFFERENT, test) or "" if state == FAILED else _NOT_REACHED)] = None
            detail = outcome.details[-1].strip()[-300:] if outcome.details else ""
            sys.stdout.write(f"{state}: {test}: {reason or detail}\n")
    return {**counts, "why": "; ".join(filter(None, why))}


if __name__ == "__main__":
    main()
