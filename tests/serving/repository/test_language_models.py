"""Reports of language models: the runtime that would serve them, and the settings that it obeys."""

import sys
from pathlib import Path

import pytest

from sluice.serving.backend import RuntimeReport
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.folders import LocalRoot
from sluice.serving.repository.inspection import ModelReport, inspect_repositories
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine
from tests.stand_ins.paths import STAND_INS


def parameter(key: str, text: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n'


def inspected(root: Path, *parameters: str) -> ModelReport:
    (root / "m").mkdir(exist_ok=True)
    (root / "m" / "config.pbtxt").write_text('backend: "tensorrtllm"\n' + "".join(parameters))
    (report,) = inspect_repositories([LocalRoot(root)], BackendRegistry())
    return report


def checkpoint(folder: Path) -> None:
    make_checkpoint(folder, with_tokenizer=True)
    (folder / "model.safetensors").touch()


def test_on_openvino(root: Path) -> None:
    checkpoint(root / "m" / "1")
    report = inspected(root, parameter("max_num_seqs", "8"), parameter("multi_block_mode", "true"))
    assert report.runtime is not None
    assert report.runtime.runtime == "openvino"
    assert report.runtime.obeyed == ("max_num_seqs",)
    assert report.runtime.unused == ("multi_block_mode: there is no GPU to set up",)
    assert (report.errors, report.notes) == ((), ())


def test_a_library_that_cannot_be_imported_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sluice.engine.runners.openvino.source", None)  # its import raises ImportError
    checkpoint(root / "m" / "1")
    (error,) = inspected(root).errors
    assert error.message.startswith("OpenVINO cannot be imported: ")


def test_the_files_of_its_text_are_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[Path]()
    monkeypatch.setattr("sluice.pipelines.llm.backend.read_text_files", lambda path, *rest: reads.append(path))
    checkpoint(root / "m" / "1")
    assert inspected(root).runtime is not None
    assert reads == [root / "m" / "1"]


def test_on_tensorrt_llm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))
    (root / "m").mkdir()
    make_compiled_engine(root / "m" / "1")
    tokenizer = make_checkpoint(root.parent / "tokenizer", with_tokenizer=True)
    given = (
        parameter("tokenizer_dir", str(tokenizer)),
        parameter("multi_block_mode", "true"),
        parameter("gpu_device_ids", "0,1"),
        parameter("max_beam_width", "4"),
    )
    assert inspected(root, *given).runtime == RuntimeReport(
        "tensorrt_llm",
        "the folder holds a compiled engine of TensorRT-LLM",
        ("max_beam_width", "multi_block_mode", "tokenizer_dir"),
        (
            "gpu_device_ids: ranks are started by the launcher (MPI) or orchestrator_type; GPUs are chosen by "
            "CUDA_VISIBLE_DEVICES",
        ),
    )


def test_a_parameter_that_would_not_load_is_told_with_its_line(root: Path) -> None:
    checkpoint(root / "m" / "1")
    report = inspected(root, parameter("max_num_seqs", "8"), parameter("max_beam_width", "4"))
    (error,) = report.errors
    assert (error.line, error.path) == (3, 'parameters["max_beam_width"]')
    assert "parameter 'max_beam_width' of model 'm' must be for one beam" in error.message
    assert report.runtime is None


def test_a_model_yaml_alone_is_a_language_model(root: Path) -> None:
    checkpoint(root / "weights")
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.yaml").write_text(f"model: {root}/weights\n")
    reports = inspect_repositories([LocalRoot(root)], BackendRegistry())
    report = next(each for each in reports if each.name == "m")
    assert (report.backend, report.errors) == ("llm", ())


def test_what_would_choose_code_is_among_what_has_no_effect(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))
    checkpoint(root / "m" / "1")
    (root / "m" / "1" / "model.yaml").write_text("custom_tokenizer: evil.Tokenizer\n")
    report = inspected(root, parameter("runtime", "tensorrt_llm"), parameter("post_processor_hook", "evil.hook"))
    assert report.runtime is not None
    reason = "what chooses code to run is taken from the command line alone, by --runtime-setting"
    assert report.runtime.unused == (f"post_processor_hook: {reason}", f"model.yaml: custom_tokenizer: {reason}")
    assert report.runtime.obeyed == ("runtime",)
