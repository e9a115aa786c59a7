"""Files that share something costly go to one worker, others each to its own."""

import pytest

from tests.paths import ROOT
from tests.sharing import TOGETHER, SharingScheduling


@pytest.mark.parametrize("beginning", [each for group in TOGETHER for each in group])
def test_files_have_such_a_name(beginning: str) -> None:
    names = (each.relative_to(ROOT).as_posix() for each in (ROOT / "tests").rglob("test_*.py"))
    assert any(name.startswith(beginning) for name in names)


def test_a_file_s_scope_is_its_name_or_what_it_shares() -> None:
    scheduling = SharingScheduling.__new__(SharingScheduling)
    canary, streams, faults = (
        scheduling._split_scope(f"tests/triton/test_{name}.py::test_it") for name in ("canary", "streams", "faults")
    )
    assert canary == streams != faults == "tests/triton/test_faults.py"
