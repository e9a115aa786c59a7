"""The part of the backend that needs no torch: names, parameters, call specs, and the error where torch is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.pytorch.backend import PyTorchBackend
from sluice.serving.backends.pytorch.options import TorchOptions, ignored_parameters, parse_options
from sluice.serving.backends.pytorch.signature import (
    match_inputs,
    match_outputs,
    match_paths,
    parse_input_paths,
    parse_output_paths,
)
from tests.serving.backends.builders import CONTEXT
from tests.serving.backends.pytorch.parts import load, source_of

TENSORS = """
    input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
LEAF: dict[str, object] = {"type": None, "context": None, "children_spec": []}


def spec_of(tree: dict[str, object]) -> str:
    return json.dumps([1, tree])


def tree(kind: str, children: list[dict[str, object]], keys: list[str] | None = None) -> dict[str, object]:
    """Write a call spec as PyTorch does, with JSON within JSON."""
    return {"type": f"builtins.{kind}", "context": json.dumps(keys), "children_spec": children}


def parameters(**given: str) -> ModelConfig:
    config = ModelConfig()
    for key, value in given.items():
        config.parameters[key].string_value = value
    return config


def test_the_backend_imports_no_torch() -> None:
    code = (
        "import sys, sluice.serving.backends.pytorch.backend as b; b.PyTorchBackend(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_without_torch_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    source_of(tmp_path, "")
    (tmp_path / "1" / "model.pt").write_bytes(b"")
    with pytest.raises(SluiceError) as caught:
        await load(tmp_path, TENSORS)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.message.startswith("unable to load model 'm', backend 'pytorch' needs PyTorch")
    assert "pip install 'sluice[pytorch]'" in caught.value.message


async def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match=r"unable to find '.*/1/model\.pt2' for model instance 'm'"):
        await load(tmp_path, f'platform: "torch_aoti" {TENSORS}')


@pytest.mark.parametrize(
    ("text", "platform", "filename"),
    [
        ("", "pytorch_libtorch", "model.pt"),
        ('platform: "torch_aoti"', "torch_aoti", "model.pt2"),
        ('default_model_filename: "other.pt"', "pytorch_libtorch", "other.pt"),
        ('platform: "pytorch_libtorch" default_model_filename: "model.pt2"', "torch_aoti", "model.pt2"),
    ],
)
async def test_platform_and_file_are_completed(tmp_path: Path, text: str, platform: str, filename: str) -> None:
    config = await PyTorchBackend().complete(source_of(tmp_path, text), CONTEXT)
    assert (config.platform, config.default_model_filename) == (platform, filename)


async def test_a_foreign_platform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="unexpected platform type 'onnxruntime_onnx' for m; backend 'pytorch' has"):
        await load(tmp_path, 'platform: "onnxruntime_onnx"')


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b", "a"], {"b": 1, "a": 0}),
        (["in__1", "in__0"], {"in__1": 1, "in__0": 0}),
        (["first", "second"], {"first": 0, "second": 1}),
        (["a", "second"], {"a": 0, "second": 1}),
        (["b", "x__one"], {"b": 0, "x__one": 1}),
    ],
    ids=["arguments", "indexes", "order", "not all arguments", "not all indexes"],
)
def test_inputs_find_their_arguments(names: list[str], expected: dict[str, int]) -> None:
    assert match_inputs("m", names, [], ["a", "b"]) == expected


def test_inputs_of_the_sequence_batcher_go_by_index_or_argument() -> None:
    positions = match_inputs("m", ["x"], ["START__1", "corrid"], ["x", "start", "corrid"])
    assert positions == {"x": 0, "START__1": 1, "corrid": 2}
    with pytest.raises(SluiceError, match="input 'START' does not follow <name>__<index> naming convention"):
        match_inputs("m", ["x"], ["START"], ["x", "start"])


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a"], "unable to load model 'm', configuration expects 1 inputs, model provides 2"),
        (["x__0", "x__2"], "input 'x__2' refers to input 2, model provides 2, counted from 0"),
        (["x__0", "y__0"], "inputs 'x__0' and 'y__0' both are input 0"),
        ([], r"must contain at least one input, none were specified\. .* \(forward takes a, b\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(names: list[str], reason: str) -> None:
    with pytest.raises(SluiceError, match=reason):
        match_inputs("m", names, [], ["a", "b"])


def test_outputs_go_by_index_or_in_order() -> None:
    assert match_outputs(["y__1"], ["state__0"]) == {"y__1": 1, "state__0": 0}
    assert match_outputs(["sum", "y__0"], []) == {"sum": 0, "y__0": 1}
    with pytest.raises(SluiceError, match="must contain at least one output"):
        match_outputs([], [])
    with pytest.raises(SluiceError, match="state 'h' does not follow"):
        match_outputs(["y__0"], ["h"])


def test_parameters() -> None:
    assert parse_options(ModelConfig()) == TorchOptions()
    given = parameters(
        DISABLE_OPTIMIZED_EXECUTION="true",
        INFERENCE_MODE="OFF",
        DISABLE_CUDNN="1",
        ENABLE_CACHE_CLEANING="on",
        ENABLE_WEIGHT_SHARING="true",
        ENABLE_JIT_PROFILING="false",
        ENABLE_JIT_EXECUTOR="true",
        ENABLE_TENSOR_FUSER="0",
        INTRA_OP_THREAD_COUNT="2",
        NUM_INTEROP_THREADS="3",
    )
    assert parse_options(given) == TorchOptions(False, False, False, True, True, False, True, False, 2, 3)
    assert parse_options(parameters(INTRA_OP_THREAD_COUNT="0")).intra_op_threads is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"INFERENCE_MODE": "maybe"}, "parameter 'INFERENCE_MODE': failed to convert 'maybe' to boolean"),
        ({"INTER_OP_THREAD_COUNT": "x"}, "parameter 'INTER_OP_THREAD_COUNT': failed to convert 'x' to integral number"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(SluiceError, match=reason):
        parse_options(parameters(**given))


def test_parameters_that_do_nothing_are_named() -> None:
    assert ignored_parameters(parameters(ENABLE_NVFUSER="true", INFERENCE_MODE="true")) == [
        "ENABLE_NVFUSER (NVFuser is no longer part of PyTorch)"
    ]


def test_tensors_of_a_package_are_named_by_their_paths() -> None:
    arguments = tree("tuple", [LEAF, tree("list", [LEAF, LEAF])])
    keywords = tree("dict", [LEAF, tree("dict", [LEAF], ["a"])], ["mask", "more"])
    assert parse_input_paths(spec_of(tree("tuple", [arguments, keywords]))) == {
        "ARGS[0]": 0,
        "ARGS[1][0]": 1,
        "ARGS[1][1]": 2,
        "KWARGS[mask]": 3,
        "KWARGS[more][a]": 4,
        "mask": 3,
    }
    assert parse_output_paths(spec_of(LEAF)) == {"RESULT": 0}
    results = tree("dict", [LEAF, LEAF], ["logits", "7"])
    assert parse_output_paths(spec_of(results)) == {"RESULT[logits]": 0, "RESULT[7]": 1, "logits": 0}


def test_tensors_of_a_package_are_found_by_path_or_number() -> None:
    paths = {"ARGS[0]": 0, "KWARGS[mask]": 1, "mask": 1}
    assert match_paths("m", "input", ["mask", "INPUT__0"], paths) == {"mask": 1, "INPUT__0": 0}
    assert match_paths("m", "output", ["OUTPUT__1"], paths) == {"OUTPUT__1": 1}
    with pytest.raises(SluiceError, match=r"unexpected inference input 'x', allowed inputs are: .*INPUT__1, ARGS\[0\]"):
        match_paths("m", "input", ["x", "mask"], paths)
    with pytest.raises(SluiceError, match="configuration expects 1 inputs, model provides 2"):
        match_paths("m", "input", ["mask"], paths)


def test_containers_that_cannot_be_addressed_are_refused() -> None:
    spec = spec_of({"type": "collections.OrderedDict", "context": "[]", "children_spec": []})
    with pytest.raises(SluiceError, match=r"the package has a collections\.OrderedDict among its inputs or outputs"):
        parse_output_paths(spec)
