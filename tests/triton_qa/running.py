"""Running suites of Triton's QA, each with a network, processes and ports of its own, and reading their outcomes."""

import ast
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.triton_qa.workspace import Workspace

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_OUTCOMES = {"Success": PASSED, "Failure": FAILED, "Error": FAILED}
_ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Suites listen on Triton's own ports, and leave servers running where they give up."""

_SCRIPT = "ip link set lo up && exec bash test.sh"


@dataclass(slots=True)
class Outcome:
    """The outcome of one test of a file, over all the servers that a suite runs it against."""

    name: str
    state: str = NOT_RUN
    details: list[str] = field(default_factory=list)


def run_suite(workspace: Workspace, suite: str, environment: dict[str, str], timeout_s: float) -> None:
    """Run a suite's test.sh; its outcomes go to the suite's record, its output to test.log."""
    folder = workspace.qa / suite
    record = record_of(workspace, suite)
    record.unlink(missing_ok=True)
    with open(record.with_suffix(".log"), "w", encoding="utf-8") as log:
        subprocess.run(
            ["timeout", "--signal=KILL", str(timeout_s), *_ALONE, "bash", "-c", _SCRIPT],
            cwd=folder,
            env=workspace.environment(record) | environment | {"PWD": str(workspace.server / "qa" / suite)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )


def record_of(workspace: Workspace, suite: str) -> Path:
    return workspace.root / "records" / f"{suite}.jsonl"


def read_outcomes(workspace: Workspace, suite: str) -> dict[str, list[Outcome]]:
    """Return the outcomes of every test of the suite, by file. A test passed if it passed against every server."""
    tests = {path.name: {name: Outcome(name) for name in list_tests(path)} for path in _test_files(workspace, suite)}
    record = record_of(workspace, suite)
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        row = json.loads(line)
        found = tests.setdefault(row["file"], {})
        name = ".".join(row["test"].split(" ")[0].split(".")[-2:])
        if "[" in name:  # one of several with parameters, which stand for the one in the file
            found.pop(name.partition("[")[0], None)
        outcome = found.setdefault(name, Outcome(name))
        state = _OUTCOMES.get(row["outcome"])
        if state == FAILED:
            outcome.details.append(row["detail"])
        if state is not None and outcome.state != FAILED:
            outcome.state = state
    return {file: list(found.values()) for file, found in tests.items() if found}


def _test_files(workspace: Workspace, suite: str) -> Iterator[Path]:
    yield from sorted((workspace.qa / suite).glob("*.py"))


def list_tests(path: Path) -> Iterator[str]:
    """Yield `Class.method` of each test in a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test"):
                    yield f"{node.name}.{each.name}"
