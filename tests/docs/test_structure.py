"""The figures that docs/reference/structure.md states hold."""

import re

import pytest

from tests.paths import DOCS
from tests.tools.structure_page import paths

PAGE = DOCS / "reference" / "structure.md"


@pytest.mark.long
def test_requests_run_through_no_more_files_than_stated() -> None:
    bounds = {name: int(most) for name, most in re.findall(r"^\| (\w+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)}
    found = paths()
    assert bounds.keys() == found.keys()
    if any(len(files) > bounds[name] for name, files in found.items()):
        # On a slow machine a timer may come in every trace of a request: it will not do so twice.
        again = paths()
        found = {name: sorted({*files} & {*again[name]}) for name, files in found.items()}
    for name, files in found.items():
        assert len(files) <= bounds[name], f"{name}: {len(files)} files: {' '.join(files)}"
