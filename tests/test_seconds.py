"""`--record-seconds` writes files that take long, keeps those of other runs, and drops those that are gone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import seconds
from tests.paths import TESTS


def test_a_run_replaces_its_own_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "seconds.toml"
    file.write_text('# Why.\n\n"conftest.py" = 3.0\n"gone.py" = 9.0\n"quick.py" = 5.0\n"test_bounds.py" = 2.0\n')
    monkeypatch.setattr(seconds, "FILE", file)
    recorder = seconds.Recorder()
    for path, took in (("tests/test_bounds.py", 0.7), ("tests/test_bounds.py", 0.8), ("tests/quick.py", 0.1)):
        recorder.pytest_runtest_logreport(cast(Any, SimpleNamespace(location=(path, 1, ""), duration=took)))
    recorder.pytest_sessionfinish()
    assert file.read_text().startswith("# Why.\n\n")
    assert seconds.read_seconds() == {TESTS / "conftest.py": 3.0, TESTS / "test_bounds.py": 1.5}
