"""`sluice repository prune`: its table, its question and what it deletes."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from sluice.cli.repository.command import command


def write(root: Path, name: str, *sizes: int, config: str = "") -> None:
    """Write versions 1, 2, ... of a model, with files of these sizes."""
    for version, size in enumerate(sizes, start=1):
        (root / name / str(version)).mkdir(parents=True)
        (root / name / str(version) / "model.onnx").write_bytes(bytes(size))
    (root / name / "config.pbtxt").write_text(config)


def versions(root: Path, name: str) -> list[str]:
    return sorted(each.name for each in (root / name).iterdir() if each.is_dir())


def prune(*arguments: str | Path) -> int:
    try:
        return command(["prune", *map(str, arguments)])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


TABLE = """\
model    version       size
bert           1    2.0 KiB  served until now: version_policy all
bert           2      100 B  served until now: version_policy all
encoder        1    3.0 MiB

stays: pinned version 1, its version_policy names it
3 versions, 3.0 MiB
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "bert", 2048, 100, 1, 1, config="version_policy { all { } }")
    write(tmp_path, "encoder", 3 << 20, 1, 1)
    write(tmp_path, "pinned", 1, 1, 1, config="version_policy { specific { versions: [1, 3] } }")
    write(tmp_path, "young", 1)
    return tmp_path


def test_a_dry_run_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(str(each) for each in root.rglob("*"))
    assert prune("--keep", "2", "--dry-run", root) == 0
    assert capsys.readouterr().out == TABLE
    assert sorted(str(each) for each in root.rglob("*")) == before


def test_old_versions_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune("--keep", "2", root) == 2, "without a terminal nobody has said yes"
    assert "there is no terminal to ask" in capsys.readouterr().err
    assert prune("--keep", "2", "--yes", root) == 0
    assert capsys.readouterr().out == f"{TABLE}deleted, 3.0 MiB freed\n"
    left = {name: versions(root, name) for name in ("bert", "encoder", "pinned", "young")}
    assert left == {"bert": ["3", "4"], "encoder": ["2", "3"], "pinned": ["1", "2", "3"], "young": ["1"]}
    assert sorted(each.name for each in root.iterdir()) == ["bert", "encoder", "pinned", "young"]
    assert prune("--keep", "2", root) == 0
    assert capsys.readouterr().out == "stays: pinned version 1, its version_policy names it\nnothing to delete\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "code", "left"),
    [("y\n", 0, ["2", "3"]), ("YES\n", 0, ["2", "3"]), ("\n", 1, ["1", "2", "3"]), ("", 1, ["1", "2", "3"])],
)
def test_a_terminal_is_asked(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
    left: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    assert prune("--keep", "2", root) == code
    captured = capsys.readouterr()
    assert "delete them? [y/N] " in captured.out
    assert ("nothing was deleted" in captured.err) == bool(code)
    assert versions(root, "encoder") == left


@pytest.mark.parametrize("flag", ["--yes", "--dry-run"])
def test_a_terminal_is_not_asked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal("n\n"))
    assert prune("--keep", "2", flag, root) == 0
    assert "delete them?" not in capsys.readouterr().out


def test_what_cannot_be_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    delete = shutil.rmtree

    def delete_small(path: Path) -> None:
        if "encoder" in path.name:
            raise PermissionError(13, "Permission denied")
        delete(path)

    monkeypatch.setattr("sluice.serving.repository.pruning.shutil.rmtree", delete_small)
    assert prune("--keep", "2", "--yes", root) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"sluice repository prune: error: {root}/encoder/1 cannot be deleted: [Errno 13] Permission denied\n"
    )
    assert captured.out.endswith("deleted, 2.1 KiB freed\n")
    assert versions(root, "bert") == ["3", "4"]


def test_nothing_goes_where_a_configuration_cannot_be_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "wrong", 1, config="version_polici { }")
    assert prune("--keep", "1", root) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        "wrong/config.pbtxt:1:1: ModelConfig has no field 'version_polici'; did you mean 'version_policy'?"
        in captured.err
    )
    assert captured.err.endswith("; nothing was deleted\n")
    assert versions(root, "bert") == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("{root}",), "the following arguments are required: --keep (see sluice repository prune --help)"),
        (("--keep", "0", "{root}"),
         "argument --keep: must be a whole number of at least 1, got '0' (see sluice repository prune --help)"),
        (("--keep", "x", "{root}"),
         "argument --keep: must be a whole number of at least 1, got 'x' (see sluice repository prune --help)"),
        (("--keep", "1", "{root}/nowhere"), "{root}/nowhere is no folder"),
        (("--keep", "1", "{root}/bert"),
         "{root}/bert is a model, not a repository of models; its repository is {root}"),
        (("--keep", "1", "s3://bucket/models"),
         "s3://bucket/models is no folder of this machine: prune deletes only in those"),
    ],
)  # fmt: skip
def test_what_cannot_be_pruned(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    assert prune(*(each.format(root=root) for each in arguments)) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"sluice repository prune: error: {error.format(root=root)}\n")
