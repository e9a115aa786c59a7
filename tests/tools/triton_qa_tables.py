"""The table of Triton's own tests that ran against Sluice, from the outcomes that `python -m tests.triton_qa` wrote."""

import json
from collections.abc import Callable, Mapping

from tests.paths import DATA

_COLUMNS = ("passed", "failed", "not run", "why")


def _table() -> str:
    rows = json.loads((DATA / "triton_qa" / "outcomes.json").read_text(encoding="utf-8"))
    passed, failed, not_run = (sum(row[state] for row in rows.values()) for state in ("passed", "failed", "not run"))
    lines = [
        f"{len(rows)} files, {passed + failed} tests that can run, {passed} passed ({passed / (passed + failed):.1%}).",
        "",
        "| file | passed | failed | not run | why |",
        "|---|---|---|---|---|",
        *(f"| `{file}` | {' | '.join(str(row[column]) for column in _COLUMNS)} |" for file, row in rows.items()),
        f"| all | {passed} | {failed} | {not_run} | |",
    ]
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {"triton-qa": _table}
