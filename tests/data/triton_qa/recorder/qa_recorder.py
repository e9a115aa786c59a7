"""Appends outcomes of tests to the file that QA_RECORD names, a JSON object on each line. Also a plugin of pytest."""

import json
import os

_OUTCOMES = {"passed": "Success", "failed": "Failure", "skipped": "Skip"}


def record(file: str, test: str, outcome: str, detail: str) -> None:
    """Append one outcome. `test` ends in `Class.method`."""
    path = os.environ.get("QA_RECORD")  # noqa: TID251 - the one channel through a shell script
    if path:
        row = {"file": os.path.basename(file), "test": test, "outcome": outcome, "detail": detail[-2000:]}
        with open(path, "a", encoding="utf-8") as records:
            records.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report) -> None:  # type: ignore[no-untyped-def]  # this Python may lack pytest
    """Record what pytest reports: calls, and what keeps a call from being made."""
    if report.when == "call" or report.outcome != "passed":
        file, _, test = report.nodeid.partition("::")
        record(file, test.replace("::", "."), _OUTCOMES[report.outcome], str(report.longrepr or ""))
