"""The promises of docs/reliability.md: each has tests, which exist."""

import ast
import re

from sluice.load.chaos.faults import FAULTS
from tests.paths import DOCS, ROOT

PAGE = (DOCS / "reliability.md").read_text()
_TEST = re.compile(r"^ +- `(tests/[\w/]+\.py)::(test_\w+)`$", re.MULTILINE)
_PROMISE = re.compile(r"^- \*\*.*(?:\n  \S.*)*\n((?: +- .*\n)*)", re.MULTILINE)


def test_every_named_test_exists() -> None:
    named = _TEST.findall(PAGE)
    assert len(named) > 50
    for path, name in named:
        defined = {getattr(each, "name", None) for each in ast.walk(ast.parse((ROOT / path).read_text()))}
        assert name in defined, f"{path} has no {name}"


def test_every_promise_names_a_test() -> None:
    promises = list(_PROMISE.finditer(PAGE))
    assert len(promises) > 20
    assert [each[0] for each in promises if not _TEST.search(each[1])] == []


def test_every_fault_is_described() -> None:
    assert set(re.findall(r"`(\w+)`", PAGE)) >= set(FAULTS)
