"""The seeded faults of `python -m tests.tools.mutate` can be made, so that a change of a line renews its fault."""

from tests.paths import ROOT
from tests.tools.mutate import FOLDER, read_faults


def test_every_fault_can_be_made() -> None:
    for file in FOLDER.glob("*.toml"):
        for fault in read_faults(file.read_text()):
            assert fault.made_in((ROOT / fault.file).read_text())
            assert not [each for each in fault.tests if not (ROOT / each).exists()], fault
