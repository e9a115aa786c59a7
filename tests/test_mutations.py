"""The seeded faults of `python -m tests.tools.mutate` can be made, so that a change of a line renews its fault."""

import pytest

from tests.paths import ROOT
from tests.tools.mutate import FOLDER, Fault, read_faults

FAULT = Fault("sluice/backoff.py", "a > b", "a < b", ("tests/sluice",))


def test_every_fault_can_be_made() -> None:
    for file in FOLDER.glob("*.toml"):
        for fault in read_faults(file.read_text()):
            assert fault.made_in((ROOT / fault.file).read_text())
            assert not [each for each in fault.tests if not (ROOT / each).exists()], fault


@pytest.mark.parametrize("source", ["a < b", "a > b or a > b"])
def test_a_fault_stands_for_one_place(source: str) -> None:
    with pytest.raises(ValueError, match="times in the file"):
        FAULT.made_in(source)


def test_a_fault_that_changes_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="changes nothing"):
        FAULT._replace(becomes="a >  b").made_in("a > b")


@pytest.mark.parametrize("row", ["tests = []", 'tests = ["x"]\nwhy = ""', ""], ids=["no tests", "unknown", "missing"])
def test_a_row_has_all_that_a_fault_needs(row: str) -> None:
    with pytest.raises(ValueError, match="a fault has"):
        read_faults(f'[[fault]]\nfile = "a.py"\nwas = "a"\nbecomes = "b"\n{row}')
