"""Requests run through no more files than tests/bounds.toml says."""

import pytest

from tests.tools.bounds import FILE, PATHS, read_bounds
from tests.tools.structure_page import paths


@pytest.mark.long
def test_requests_run_through_no_more_files_than_their_bounds() -> None:
    bounds = {name.partition(".")[2]: row.most for name, row in read_bounds(FILE.read_text()).items() if PATHS in name}
    found = paths()
    assert bounds.keys() == found.keys()
    if any(len(files) > bounds[name] for name, files in found.items()):
        # On a slow machine a timer may come in every trace of a request: it will not do so twice.
        again = paths()
        found = {name: sorted({*files} & {*again[name]}) for name, files in found.items()}
    for name, files in found.items():
        assert len(files) <= bounds[name], f"{name}: {len(files)} files: {' '.join(files)}"
