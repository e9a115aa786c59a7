"""Reports of `sluice repository check`, which loads no model."""

import venv
from pathlib import Path
from uuid import uuid4

import fsspec
import onnx
import pytest
from onnx import TensorProto, helper

from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.repository.folders import LocalRoot
from sluice.serving.repository.inspection import ModelReport, Verdict, inspect_repositories
from sluice.serving.repository.roots import open_roots
from tests.serving.repository.parts import StampBackend, ensemble_config, write_model

STAMP = """backend: "stamp"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


def inspected(*roots: Path, has_namespaces: bool = False) -> dict[str, ModelReport]:
    registry = BackendRegistry()
    registry.register(StampBackend())
    reports = inspect_repositories([LocalRoot(each) for each in roots], registry, has_namespaces=has_namespaces)
    assert [report.name for report in reports] == sorted(report.name for report in reports)
    return {report.name: report for report in reports}


def told(report: ModelReport) -> list[str]:
    """Errors, then notes."""
    return [each.text("c" if each.line else "") for each in (*report.errors, *report.notes)]


def test_models_that_would_load(root: Path) -> None:
    write_model(root, "a", 1, 2, config=f"{STAMP}version_policy {{ all {{ }} }}")
    write_model(root, "e", 0, config=ensemble_config("a", "a"))
    (root / ".hidden").mkdir()
    reports = inspected(root)
    assert {name: (report.verdict, report.versions) for name, report in reports.items()} == {
        "a": (Verdict.OK, (1, 2)),
        "e": (Verdict.OK, (1,)),
    }
    assert (reports["a"].backend, reports["e"].backend) == ("stamp", "ensemble")
    assert reports["a"].folders == (str(root / "a"),)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (f"{STAMP}name: 'b'",
         ["c:4: unexpected directory name 'a' for model 'b', directory name must equal model name; write: name: \"a\", "
          "or no name at all"]),
        ('platform: "onnx"',
         ["c:1: unexpected platform type 'onnx' for a; write: platform: \"onnxruntime_onnx\""]),
        ('platform: "dali"',
         ["c:1: unexpected platform type 'dali' for a; write: backend in place of platform"]),
        (f"{STAMP}max_batch: 3\nnum_versions: 1",
         ["c:4:1: ModelConfig has no field 'max_batch'; did you mean 'max_batch_size'?",
          "c:5:1: ModelConfig has no field 'num_versions'; it stands in version_policy.latest"]),
        (f"{STAMP}max_batch_size: -1\ndynamic_batching {{\n preferred_batch_size: [2] }}",
         ["c:4: 'max_batch_size' must be non-negative value for a; write: max_batch_size: 0 for a model that takes no "
          "batches",
          "c:6: dynamic batching preferred size must be <= max batch size for a; write: max_batch_size: 2"]),
        (f"{STAMP}max_batch_size: 2\ndynamic_batching {{\n preferred_batch_size: [1, 4] }}",
         ["c:6: dynamic batching preferred size must be <= max batch size for a; write: max_batch_size: 4, or "
          "preferred sizes up to 2"]),
        (STAMP.replace("[ 1 ]", "[ 0 ]"),
         ["c:3: model output 'OUT' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for a; "
          "write: -1 for a size that varies"]),
        (STAMP.replace("dims: [ 1 ]", "label_filename: 'labels.txt'"),
         ["c:3: failed to open text file for read {root}/a/labels.txt: No such file or directory"]),
        (STAMP.replace("dims: [ 1 ]", "label_filename: '../labels.txt'"),
         ["c:3: '../labels.txt' is not a path inside a model's folder"]),
        (f"{STAMP}default_model_filename: 'other.txt'",
         ["c:4: there is no model file {root}/a/1/other.txt for a; the folder has stamp.txt; write: "
          'default_model_filename: "stamp.txt"']),
        (STAMP.replace("stamp", "nope"),
         ["c:1: unable to find backend library for backend 'nope'. Installed backends: {backends}; write: backend: "
          '"python" with a model.py, or DIR/nope/model.py for --backend-directory DIR: C++ libraries '
          "(libtriton_nope.so) are not loaded"]),
        (STAMP.replace("stamp", "onnxrutime"),
         ["c:1: unable to find backend library for backend 'onnxrutime'; did you mean 'onnxruntime'? Installed "
          'backends: {backends}; write: backend: "onnxruntime"']),
        (STAMP.replace("stamp", "fil"),
         ["c:1: unable to find backend library for backend 'fil'. Installed backends: {backends}; write: convert the "
          "trees to model.onnx (onnxmltools, skl2onnx), or predict in a Python model (treelite)"]),
        (f"{STAMP}version_policy {{ specific {{ versions: [7] }} }}",
         ["c:4: at least one version must be available under the version policy of model 'a'; write: version_policy { "
          "specific { versions: [1] } }; there are 1"]),
        (f"{STAMP}optimization {{ priority: PRIORITY_MAX }}",
         ["c:4: optimization.priority is not obeyed: models share the processors evenly"]),
        (f"{STAMP}model_warmup {{ name: 'w' batch_size: 1\n inputs {{ key: 'IM' value {{ data_type: TYPE_INT32 dims: 1 "
         "zero_data: true } } }",
         ["c:5: unexpected inference input 'IM' for model 'a'"]),
        (f"{STAMP}model_warmup {{ name: 'w' batch_size: 1\n inputs {{ key: 'IN' value {{ data_type: TYPE_INT32 dims: 1 "
         "input_data_file: 'raw' } } }",
         ["c:4: failed to open text file for read {root}/a/warmup/raw: No such file or directory"]),
        (f"{STAMP}parameters {{ key: 'version_weights' value {{ string_value: 'half' }} }}",
         ["c:4: parameter 'version_weights' must be versions with weights, such as 1=95,2=5, got 'half'"]),
        (f"{STAMP}sequence_batching {{ state {{ input_name: 'I' output_name: 'O' data_type: TYPE_INT32 dims: 1\n"
         "initial_state { name: 'i' data_type: TYPE_INT32 dims: 1 data_file: 'raw' } } }",
         ["c:4: failed to open text file for read {root}/a/initial_state/raw: No such file or directory"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_one(root: Path, config: str, expected: list[str]) -> None:
    write_model(root, "a", 1, config=config)
    registry = BackendRegistry()
    registry.register(StampBackend())
    filled = {"{root}": str(root), "{backends}": ", ".join(registry.names)}
    for key, text in filled.items():
        expected = [each.replace(key, text) for each in expected]
    assert told(inspected(root)["a"]) == expected


def test_errors_of_every_stage_are_reported_together(root: Path) -> None:
    text = f"""name: "b"
max_batch: 3, max_batch_size: "many"
{STAMP.replace("[ 1 ]", "[ 0 ]").replace("TYPE_INT32 dims: [ -1 ]", "TYPE_FLAOT32, dims: [ -2 ]")}
dynamic_batching {{ preferred_batch_size: [2] }}
default_model_filename: "other.txt"
"""
    write_model(root, "a", 1, config=text)
    assert [(each.line, each.path) for each in inspected(root)["a"].errors] == [
        (2, "max_batch"),
        (4, "input[0].data_type"),
        (2, ""),
        (1, "name"),
        (7, "dynamic_batching.preferred_batch_size[0]"),
        (4, "input[0].dims"),
        (5, "output[0].dims"),
        (8, "default_model_filename"),
    ]


def test_syntax_errors_of_a_models_code_are_found_without_running_it(root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    config = STAMP.replace("stamp", "python")
    for name, code in (("a", "def execute(self)\n"), ("b", f"open({str(trace)!r}, 'w')\n"), ("c", "x = '\\d'\n\0")):
        write_model(root, name, 1, config=config)
        (root / name / "1" / "model.py").write_text(code)
    reports = inspected(root)
    assert told(reports["a"]) == [f"{root}/a/1/model.py:1: SyntaxError: expected ':'"]
    assert told(reports["b"]) == []
    assert "null bytes" in told(reports["c"])[0]
    assert not trace.exists()


LAYOUT = """backend: "{backend}" max_batch_size: 2
input [ {{ name: "A" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 4, 4 ] }} ]
output [ {{ name: "B" data_type: {data_type} dims: [ {dims} ] }} ]
"""


def write_onnx(folder: Path, name: str = "model.onnx") -> None:
    image = ["N", 3, 4, 4]
    tensors = [helper.make_tensor_value_info(each, TensorProto.FLOAT, image) for each in "AB"]
    graph = helper.make_graph([helper.make_node("Identity", ["A"], ["B"])], "g", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), folder / name)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_configurations_that_contradict_the_models_file(root: Path, backend: str) -> None:
    fitting = LAYOUT.format(backend=backend, data_type="TYPE_FP32", dims="3, 4, 4")
    other = LAYOUT.format(backend=backend, data_type="TYPE_INT8", dims="3, 4").replace('"A"', '"X"')
    for name, config in (("fits", fitting), ("other", other), ("unreadable", fitting)):
        write_model(root, name, 1, config=f'{config}default_model_filename: "model.onnx"')
        write_onnx(root / name / "1")
    (root / "unreadable" / "1" / "model.onnx").write_text("not a model")
    reports = inspected(root)
    assert (reports["fits"].verdict, told(reports["fits"])) == (Verdict.OK, [])
    found = [(each.line, each.path) for each in reports["other"].errors]
    # OpenVINO converts types to those of the configuration.
    types = [(3, "output[0].data_type")] if backend == "onnxruntime" else []
    assert found == [(2, "input[0].name"), *types, (3, "output[0].dims")]
    assert reports["unreadable"].verdict is Verdict.ERROR


PYTHON = 'backend: "python"'
MODEL = """
import os, numpy, json, engine, queue
import triton_python_backend_utils as pb_utils
from helper import value
from here.inner import other
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import only_for_a_type_checker

try:
    import faster
except ImportError:
    faster = None

import nowhere.inner

class TritonPythonModel:
    def execute(self, requests):
        import needed_later
"""


def write_python(root: Path, code: str, config: str = PYTHON, **modules: str) -> Path:
    write_model(root, "a", 1, config=config)
    version = root / "a" / "1"
    (version / "model.py").write_text(code)
    (version / "here").mkdir()
    (version / "here" / "__init__.py").write_text("")
    for name, text in modules.items():
        (version / f"{name}.py").write_text(text)
    return version


def test_modules_that_a_model_imports_and_its_python_lacks(root: Path) -> None:
    version = write_python(root, MODEL, helper="import not_there\nvalue = 1", queue="", engine="")
    report = inspected(root)["a"]
    assert [each.message for each in report.errors] == [
        f"{version}/model.py:16: it imports 'nowhere', which its Python does not have",
        f"{version}/helper.py:1: it imports 'not_there', which its Python does not have",
    ]
    assert [each.message for each in report.notes] == [
        f"{version}/model.py:20: it imports 'needed_later' when it runs, which its Python does not have",
        f"{version}/queue.py is not what `import queue` finds: an installed module has this name, and comes first",
    ]


def test_a_model_that_needs_a_module_of_sluices_name_has_to_bring_it(root: Path) -> None:
    version = write_python(root, "import engine, httpx")
    assert told(inspected(root)["a"]) == [
        f"{version}/model.py:1: it imports 'engine', which its Python does not have",
    ]


def test_the_modules_of_an_environment_are_its_own(root: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (packages / "only_here.py").touch()
    version = write_python(root, "import numpy, only_here, httpx", environment_of(tmp_path / "env"))
    assert told(inspected(root)["a"]) == [f"{version}/model.py:1: it imports 'httpx', which its Python does not have"]


def environment_of(path: Path | str) -> str:
    return f'{PYTHON} parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'


def test_an_environment_that_cannot_be_used(root: Path, tmp_path: Path) -> None:
    write_python(root, "", environment_of("$$TRITON_MODEL_DIRECTORY/env.tar.gz"))
    archive = root / "a" / "env.tar.gz"
    start = f"the execution environment '{archive}' cannot be used: "
    assert told(inspected(root)["a"]) == [f"{start}No such file or directory"]
    archive.write_text("text")
    assert told(inspected(root)["a"]) == [f"{start}it cannot be unpacked: it is no archive"]
    archive.unlink()
    archive.mkdir()
    (said,) = told(inspected(root)["a"])
    assert said.startswith(f"{start}it has no bin/python")


def test_folders_that_are_no_models_are_left_out(root: Path) -> None:
    write_model(root, "a", 1, config=STAMP)
    for name in ("lost+found", ".git", ".ipynb_checkpoints", "__pycache__"):
        (root / name).mkdir()
    assert list(inspected(root)) == ["a"]


def test_a_model_may_have_its_backend_in_its_name(root: Path) -> None:
    write_model(root, "my.stamp", 1, config=" ")
    write_model(root, "my.other", 1, config=" ")
    reports = inspected(root)
    assert (reports["my.stamp"].backend, reports["my.stamp"].errors) == ("stamp", ())
    (error,) = reports["my.other"].errors
    assert error.message.startswith("Invalid model name: Could not determine backend for model 'my.other'")


def test_a_model_without_anything(root: Path) -> None:
    (root / "empty").mkdir()
    write_model(root, "unnumbered", config=STAMP)
    (root / "unnumbered" / "v1").mkdir()
    (root / "unnumbered" / "007").mkdir()
    (root / "unnumbered" / "configs").mkdir()
    reports = inspected(root)
    assert reports["empty"].config_file == ""
    assert told(reports["empty"])[0].startswith("Invalid model name: Could not determine backend for model 'empty'")
    assert told(reports["unnumbered"]) == [
        "at least one version must be available under the version policy of model 'unnumbered'; its folder has no "
        f"version; write: {root}/unnumbered/1 with the model's file in it",
        "folder '007' is no version and is not served: versions are whole numbers from 1; write: mv 007 7",
        "folder 'v1' is no version and is not served: versions are whole numbers from 1; write: mv v1 1",
    ]


@pytest.mark.usefixtures("no_gpu")
def test_plans_that_are_not_there_are_missed_only_where_they_would_run(root: Path) -> None:
    config = 'backend: "tensorrt"\ncc_model_filenames { key: "7.5" value: "a.plan" }\n'
    write_model(root, "p", 1, config=f'{config}cc_model_filenames {{ key: "8.0" value: "stamp.txt" }}')
    report = inspected(root)["p"]
    assert report.errors == ()
    gpu, *others = told(report)
    assert gpu.startswith("c:1: unable to load model 'p': a TensorRT plan needs an NVIDIA GPU and the Python packages")
    assert "there is no GPU (plans: compute capability 7.5: a.plan" in gpu
    assert others == [
        f"c:2: there is no model file {root}/p/1/a.plan for p; the folder has stamp.txt",
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ensemble_config("aa"),
         'c:5: ensemble e contains models that are not available or ambiguous: aa; write: model_name: "a"'),
        (ensemble_config("somewhere"),
         "c:5: ensemble e contains models that are not available or ambiguous: somewhere; write: a folder somewhere "
         "with that model"),
        (ensemble_config("bad"), "c:5: ensemble 'e' depends on 'bad' which would not load"),
        (ensemble_config("a").replace("-1 input_map", "9 input_map"),
         "c:5: ensemble 'e' depends on 'a' whose required version 9 is not loaded.; write: model_version: -1 for the "
         "newest; served are 1"),
        (ensemble_config("a").replace('key: "IN"', 'key: "IM"'),
         "c:5: in ensemble e, ensemble tensor IN is mapping to non-existing input IM in model a"),
        (ensemble_config("a").replace("TYPE_INT32 dims: [ 1 ]", "TYPE_FP32 dims: [ 1 ]"),
         "c:5: in ensemble e, ensemble tensor OUT: inconsistent data type: TYPE_FP32 is inferred from model e while "
         "TYPE_INT32 is inferred from model a"),
        (f"max_batch_size: 4{ensemble_config('limited')}",
         "c:5: ensemble e allows maximum batch size 4, but it contains model limited which only allows maximum batch "
         "size to be 2"),
        (ensemble_config("e"), "c:5: circular dependency between ensembles: e -> e"),
    ],
)  # fmt: skip
def test_ensembles_and_their_members(root: Path, config: str, expected: str) -> None:
    write_model(root, "a", 1, config=STAMP)
    write_model(root, "limited", 1, config=f"{STAMP}max_batch_size: 2")
    write_model(root, "bad", 1, config="zzz: 1")
    write_model(root, "e", 1, config=config)
    assert told(inspected(root)["e"]) == [expected]


def test_an_ensemble_whose_member_tells_its_tensors_only_when_loaded(root: Path) -> None:
    write_model(root, "a", 1, config='backend: "stamp"')
    write_model(root, "e", 1, config=ensemble_config("a").replace('key: "IN"', 'key: "unknown yet"'))
    assert inspected(root)["e"].verdict is Verdict.OK


def test_several_repositories(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_model(one, "a", 1, config=STAMP)
    write_model(other, "e", 1, config=ensemble_config("a"))
    assert {report.verdict for report in inspected(one, other).values()} == {Verdict.OK}
    write_model(other, "a", 1, config=STAMP)
    reports = inspected(one, other)
    assert reports["a"].folders == (f"{one}/a", f"{other}/a")
    assert told(reports["a"]) == [f"model 'a' is ambiguous, it is in several repositories: {one}/a and {other}/a"]
    assert reports["e"].verdict is Verdict.ERROR
    assert {report.verdict for report in inspected(one, other, has_namespaces=True).values()} == {Verdict.OK}


def test_a_repository_in_a_store() -> None:
    store, path = fsspec.filesystem("memory"), f"/{uuid4().hex}"
    for name, config in (("a", STAMP), ("b", STAMP.replace("stamp", "nope"))):
        store.pipe({f"{path}/{name}/config.pbtxt": config.encode(), f"{path}/{name}/1/stamp.txt": b"1"})
    registry = BackendRegistry()
    registry.register(StampBackend())
    roots = open_roots([f"memory:/{path}"], None, 0.0)
    one, other = inspect_repositories(roots, registry)
    for root in roots:
        root.close()
    assert (one.verdict, one.folders) == (Verdict.OK, (f"memory:/{path}/a",))
    assert other.config_file == f"memory:/{path}/b/config.pbtxt"
    assert told(other)[0].startswith("c:1: unable to find backend library for backend 'nope'")


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        inspected(tmp_path / "nowhere")
