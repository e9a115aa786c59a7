"""Folders with an OpenVINO IR, as optimum-intel exports them; `tests.goldens.ir` recorded the one here."""

import logging
import shutil
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
from openvino import opset13 as ops

from sluice.engine.config import EngineConfig
from sluice.engine.loop.load import load_runner
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.drive import Driver, Prompt
from tests.engine.runners.goldens import checkpoint_path, read_goldens
from tests.errors import error_of

NAME = "gpt2_ir"


@pytest.fixture
def ir(tmp_path: Path) -> EditableCheckpoint:
    return EditableCheckpoint(shutil.copytree(checkpoint_path(NAME), tmp_path / "ir"))


def load(path: Path, **limits: Any) -> Any:
    return load_runner(EngineConfig(model_path=str(path), **{"dtype": "f32", "num_blocks": 40, **limits}))


def refusal(path: Path, **limits: Any) -> SluiceError:
    return error_of(load, path, **limits)


def test_generates_what_transformers_generates() -> None:
    goldens = read_goldens(NAME)
    prompts = [
        Prompt(golden.prompt_token_ids, golden.max_tokens, golden.repetition_penalty, first_step=2 * index)
        for index, golden in enumerate(goldens)
    ]
    runner = load(checkpoint_path(NAME))
    assert Driver(runner, chunk_sizes=(1, 5, 17, 40), seed=3).generate(prompts) == [each.token_ids for each in goldens]


def test_info_and_the_reason_for_the_runtime(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        info = load(checkpoint_path(NAME)).info
    assert (info.runtime, info.model_type, info.vocab_size, info.max_model_len) == ("openvino", "gpt2", 256, 256)
    assert (info.eos_token_ids, info.quantization, info.kv_cache_dtype) == ((2,), "none", "f32")
    assert (
        f"runtime openvino, on the CPU: {checkpoint_path(NAME)} holds an OpenVINO IR (openvino_model.xml)"
        in caplog.text
    )


def test_a_model_that_does_not_say_its_context(ir: EditableCheckpoint) -> None:
    ir.edit(n_positions=None)
    error = refusal(ir.path)
    assert (error.param, error.code) == ("max_model_len", ErrorCode.INVALID)
    assert "does not say how long a context may be: set max_model_len" in error.message
    assert load(ir.path, max_model_len=100).info.max_model_len == 100


def test_its_weights_are_as_they_are() -> None:
    error = refusal(checkpoint_path(NAME), quantization="int8")
    assert error.param == "quantization"
    assert "export it again with --weight-format int8" in error.message


def test_a_damaged_graph(ir: EditableCheckpoint) -> None:
    (ir.path / "openvino_model.xml").write_text("<net>")
    error = refusal(ir.path)
    assert error.code is ErrorCode.INVALID
    assert "openvino_model.xml is damaged" in error.message


def test_a_graph_without_state(ir: EditableCheckpoint) -> None:
    tokens = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name="input_ids")
    ov.save_model(ov.Model([ops.result(ops.convert(tokens, "f32"))], [tokens], "none"), ir.path / "openvino_model.xml")
    error = refusal(ir.path)
    assert error.code is ErrorCode.INVALID
    assert "--task text-generation-with-past" in error.message
