"""The kit has what a machine lacks, and nothing that it has."""

import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu.kit import (
    LARGEST_FILE_BYTES,
    LIMIT_BYTES,
    PRESENT,
    KitError,
    check_size,
    copy_source,
    missing,
    read_installed,
    read_present,
)
from tests.paths import ROOT

INDEX: dict[str, tuple[str, list[str]]] = {
    "web": ("2.0", ["core>=1", "speed[fast]", 'winonly; sys_platform == "win32"', "old<2; python_version < '3.12'"]),
    "core": ("1.5", ["numpy>=2", "openvino"]),
    "speed": ("0.3", ['loops>=1; extra == "fast"', 'nothing; extra == "slow"']),
    "loops": ("1.1", []),
}


def read(name: str) -> tuple[str, Iterable[str]]:
    return INDEX[name]


def test_a_present_package_and_what_it_needs_stay_out() -> None:
    assert missing(["web"], {"speed": None, "numpy": "2.5.2"}, read) == {"core": "1.5", "web": "2.0"}


def test_extras_and_markers_are_those_of_the_machine() -> None:
    assert missing(["speed[fast]"], {}, read) == {"loops": "1.1", "speed": "0.3"}
    assert missing(["speed"], {}, read) == {"speed": "0.3"}


def test_a_present_version_that_does_not_fit_is_replaced() -> None:
    assert missing(["core>=1.2"], {"core": "1.1", "numpy": "2.5.2"}, read) == {"core": "1.5"}
    assert missing(["core>=1.2"], {"core": "1.2"}, read) == {}


def test_lines_of_pip_freeze_are_read() -> None:
    assert read_present("# of a machine\nHugging_Face.Hub==1.33.0\n\njinja2  # any\n") == {
        "hugging-face-hub": "1.33.0",
        "jinja2": None,
    }


def test_a_machine_for_torch_lacks_the_server_and_keeps_its_torch() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    present = read_present(PRESENT.read_text())
    wanted = missing(requirements, present, read_installed)
    assert {"fastapi", "msgspec", "pyzmq", "uvicorn", "protobuf", "grpcio"} <= wanted.keys()
    assert not wanted.keys() & {"openvino", "torch", "triton", "transformers", "numpy", "onnxruntime"}
    for need in (need for name in wanted for need in map(Requirement, distribution(name).requires or ())):
        if need.marker is None:
            assert need.name.lower().replace("_", "-") in wanted.keys() | present.keys()


@pytest.mark.slow
def test_the_source_tree_has_no_weights_and_the_commands_names(tmp_path: Path) -> None:
    left_out = copy_source(tmp_path)
    assert {"models/rill/1/model.safetensors", "models/sentence_encoder/1/model.onnx"} <= {*left_out}
    assert all(path.stat().st_size <= LARGEST_FILE_BYTES for path in tmp_path.rglob("*"))
    assert (tmp_path / "models/rill/1/tokenizer.json").is_file()
    [metadata] = tmp_path.glob("sluice-*.dist-info")
    assert "[sluice.commands]" in (metadata / "entry_points.txt").read_text()


def test_a_kit_that_is_too_large_is_an_error() -> None:
    assert check_size(20 << 20, 30 << 20) == "50.0 MiB: 20.0 of source, 30.0 of wheels"
    with pytest.raises(KitError, match=r"larger than 50 MiB: 50\.0 MiB"):
        check_size(20 << 20, LIMIT_BYTES - (20 << 20) + 1)
