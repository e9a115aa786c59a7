"""Reports of `sluice repository check`, which loads no model."""

from pathlib import Path
from uuid import uuid4

import fsspec
import onnx
import pytest
from onnx import TensorProto, helper

from serving.backends.registry import BackendRegistry
from serving.repository.folders import LocalRoot
from serving.repository.inspection import ModelReport, Verdict, inspect_repositories
from serving.repository.roots import open_roots
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
         ["c:3: there is no label file {root}/a/labels.txt for output 'OUT'"]),
        (STAMP.replace("dims: [ 1 ]", "label_filename: '../labels.txt'"),
         ["c:3: '../labels.txt' is not a path inside a model's folder"]),
        (f"{STAMP}default_model_filename: 'other.txt'",
         ["c:4: version 1 has no model file other.txt; its folder has stamp.txt; write: default_model_filename: "
          '"stamp.txt"']),
        (STAMP.replace("stamp", "nope"),
         ["c:1: unable to find backend library for backend 'nope'. Installed backends: {backends}"]),
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


def test_an_llm_without_its_checkpoint(root: Path) -> None:
    write_model(root, "llm", 1, config='backend: "vllm"')
    (message,) = told(inspected(root)["llm"])
    assert "model 'llm' has no checkpoint in" in message


@pytest.mark.usefixtures("no_gpu")
def test_plans_that_are_not_there_are_missed_only_where_they_would_run(root: Path) -> None:
    config = 'backend: "tensorrt"\ncc_model_filenames { key: "7.5" value: "a.plan" }\n'
    write_model(root, "p", 1, config=f'{config}cc_model_filenames {{ key: "8.0" value: "stamp.txt" }}')
    report = inspected(root)["p"]
    assert report.errors == ()
    assert told(report) == [
        "c:1: a TensorRT plan needs an NVIDIA GPU, and this machine has none",
        "c:2: version 1 has no model file a.plan; its folder has stamp.txt",
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
