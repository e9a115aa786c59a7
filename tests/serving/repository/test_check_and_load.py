"""What keeps a model from loading is found by `sluice repository check`, in the same words, but for its weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from sluice.serving.backends.ensemble.backend import EnsembleBackend
from sluice.serving.backends.python.backend import find_python_based
from sluice.serving.repository.folders import LocalRoot
from sluice.serving.repository.inspection import inspect_repositories
from tests import paths
from tests.serving.repository.parts import Bench, failure
from tests.stand_ins.model_folders import make_checkpoint

TOKENIZER = paths.DATA / "tokenizers" / "rill"
IN = 'input [ { name: "%s" data_type: TYPE_%s dims: [ %s ] } ]\n'
OUT = 'output [ { name: "%s" data_type: TYPE_%s dims: [ %s ] } ]\n'
FLOATS = IN % ("x", "FP32", "1") + OUT % ("y", "FP32", "1")
INTS = IN % ("IN", "INT32", "-1") + OUT % ("OUT", "INT32", "1")
Write = Callable[[Path], None]
"""Writes files into a model's folder, which has an empty version 1."""


def parameter(key: str, text: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n'


def nothing(folder: Path) -> None:
    pass


def stamp(folder: Path) -> None:
    (folder / "1" / "stamp.txt").write_text("1")


def python(folder: Path) -> None:
    (folder / "1" / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests): ...\n")


def onnx_model(folder: Path) -> None:
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "1" / "model.onnx")


def torch_file(folder: Path) -> None:
    (folder / "1" / "model.pt").touch()


def tokenizer(folder: Path) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", folder / "1" / "tokenizer.json")


def broken_tokenizer(folder: Path) -> None:
    (folder / "1" / "tokenizer.json").write_text("{")


def checkpoint(folder: Path) -> None:
    (folder / "1").rmdir()
    make_checkpoint(folder / "1", with_tokenizer=True)
    (folder / "1" / "model.safetensors").touch()


def with_file(name: str, text: str) -> Write:
    """A checkpoint in whose folder a file has another text."""

    def write(folder: Path) -> None:
        checkpoint(folder)
        (folder / "1" / name).write_text(text)

    return write


def without_tokenizer(folder: Path) -> None:
    checkpoint(folder)
    for file in (folder / "1").glob("tokenizer*"):
        file.unlink()


def of_type(model_type: str) -> Write:
    """A checkpoint of another type, which stands in its config.json."""

    def write(folder: Path) -> None:
        checkpoint(folder)
        path = folder / "1" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))

    return write


TEXT_IN = IN % ("text_input", "STRING", "1")
LLM = 'backend: "llm"\n' + parameter("runtime", "openvino")
OPENAI = 'backend: "openai"\n' + parameter("base_url", "http://localhost:1/v1") + parameter("model", "m")
BROKEN: dict[str, tuple[Write, str, str]] = {
    "every instance is passive": (
        stamp,
        f'backend: "stamp"\n{INTS}instance_group [ {{ kind: KIND_CPU passive: true }} ]',
        "passive ones take no requests",
    ),
    "the model's file is missing": (nothing, f'backend: "stamp"\n{INTS}', "there is no model file"),
    "the model's file has another name": (
        stamp,
        f'backend: "stamp"\n{INTS}default_model_filename: "a.txt"',
        "there is no model file",
    ),
    "the model's file is another's": (
        stamp,
        f'backend: "stamp"\n{INTS}default_model_filename: "../../secret.txt"',
        "is not a path inside a model's folder",
    ),
    "the labels are missing": (
        stamp,
        f'backend: "stamp"\n{INTS}'.replace('"OUT"', '"OUT" label_filename: "labels.txt"'),
        "failed to open text file for read",
    ),
    "the labels are another's": (
        stamp,
        f'backend: "stamp"\n{INTS}'.replace('"OUT"', '"OUT" label_filename: "../labels.txt"'),
        "is not a path inside a model's folder",
    ),
    "python: a parameter": (
        python,
        f'backend: "python"\n{INTS}{parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "maybe")}',
        "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe'",
    ),
    "onnxruntime: a parameter": (
        onnx_model,
        f'backend: "onnxruntime"\n{FLOATS}{parameter("intra_op_thread_count", "many")}',
        "parameter 'intra_op_thread_count' is 'many'",
    ),
    "onnxruntime: an accelerator": (
        onnx_model,
        f'backend: "onnxruntime"\n{FLOATS}optimization {{ execution_accelerators {{ cpu_execution_accelerator '
        '[ { name: "abacus" } ] } }',
        "unknown Execution Accelerator 'abacus' is requested",
    ),
    "onnxruntime: an input of another name": (
        onnx_model,
        'backend: "onnxruntime"\n' + FLOATS.replace('"x"', '"z"'),
        "unexpected inference input 'z'",
    ),
    "openvino: a parameter": (
        onnx_model,
        f'backend: "openvino"\ndefault_model_filename: "model.onnx"\n{FLOATS}{parameter("NUM_STREAMS", "many")}',
        "NUM_STREAMS",
    ),
    "tensorflow: operations that initialize": (
        lambda folder: (folder / "1" / "model.savedmodel").mkdir(),
        f'backend: "tensorflow"\n{FLOATS}{parameter("TF_INIT_OPS_FILE", "init")}',
        "parameter 'TF_INIT_OPS_FILE'",
    ),
    "tensorflow: threads": (
        lambda folder: (folder / "1" / "model.savedmodel").mkdir(),
        f'backend: "tensorflow"\n{FLOATS}{parameter("TF_NUM_INTRA_THREADS", "many")}',
        "expected the parameter 'TF_NUM_INTRA_THREADS'",
    ),
    "pytorch: a parameter": (
        torch_file,
        'backend: "pytorch"\n'
        + IN % ("INPUT__0", "FP32", "1")
        + OUT % ("OUTPUT__0", "FP32", "1")
        + parameter("INTRA_OP_THREAD_COUNT", "many"),
        "failed to convert 'many' to integral number",
    ),
    "pytorch: a state without a place": (
        torch_file,
        f'backend: "pytorch"\n{IN % ("INPUT__0", "FP32", "1")}{OUT % ("OUTPUT__0", "FP32", "1")}'
        'sequence_batching { state { input_name: "INPUT__1" output_name: "s" data_type: TYPE_FP32 dims: 1 } }',
        "state 's' does not follow the <name>__<index> naming convention",
    ),
    "pytorch: another platform": (
        torch_file,
        f'backend: "pytorch"\nplatform: "onnxruntime_onnx"\n{FLOATS}',
        "backend 'pytorch' has",
    ),
    "preprocessing: no tokenizer": (nothing, 'backend: "preprocessing"', "needs the parameter 'tokenizer_dir'"),
    "preprocessing: a tokenizer that is not there": (
        nothing,
        f'backend: "preprocessing"\n{parameter("tokenizer_dir", "nowhere")}',
        "nowhere",
    ),
    "preprocessing: a flag": (
        nothing,
        f'backend: "preprocessing"\n{parameter("tokenizer_dir", str(TOKENIZER))}'
        f"{parameter('add_special_tokens', 'maybe')}",
        "must be true or false, got 'maybe'",
    ),
    "postprocessing: a tensor": (
        nothing,
        f'backend: "postprocessing"\n{parameter("tokenizer_dir", str(TOKENIZER))}{IN % ("PIXELS", "FP32", "1")}',
        "PIXELS",
    ),
    "tensorrt_llm_bls: drafts": (
        nothing,
        f'backend: "tensorrt_llm_bls"\n{parameter("tensorrt_llm_draft_model_name", "draft")}',
        "is not supported by backend 'tensorrt_llm_bls'",
    ),
    "tokenizer: a parameter": (
        tokenizer,
        f'backend: "tokenizer"\n{parameter("max_tokens", "many")}',
        "max_tokens",
    ),
    "tokenizer: a tensor": (tokenizer, f'backend: "tokenizer"\n{OUT % ("y", "INT64", "-1")}', "'y' is not"),
    "tokenizer: a broken file": (broken_tokenizer, 'backend: "tokenizer"', "tokenizer.json"),
    "retriever: a parameter": (nothing, f'backend: "retriever"\n{parameter("top_k", "many")}', "many"),
    "retriever: a tensor": (nothing, f'backend: "retriever"\n{IN % ("x", "FP32", "1")}', "'x'"),
    "rag_prompt: a tokenizer that is not there": (
        nothing,
        f'backend: "rag_prompt"\n{parameter("llm", "m")}{parameter("tokenizer", "nowhere")}',
        "nowhere",
    ),
    "openai: no address": (nothing, f'backend: "openai"\n{parameter("model", "m")}', "base_url"),
    "openai: a key that is not there": (nothing, f"{OPENAI}{parameter('api_key_file', 'nowhere')}", "nowhere"),
    "openai: sequences": (nothing, f"{OPENAI}sequence_batching {{ }}", "an API keeps no state between requests"),
    "openai: a tensor": (nothing, f"{OPENAI}{IN % ('x', 'FP32', '1')}", "'x'"),
    "llm: an input": (checkpoint, f"{LLM}{IN % ('frames', 'FP32', '1')}", "the input 'frames', which no LLM has"),
    "llm: an output": (
        checkpoint,
        f"{LLM}{TEXT_IN}{OUT % ('mood', 'STRING', '1')}",
        "the output 'mood', which no LLM has",
    ),
    "llm: an input's type": (checkpoint, f"{LLM}{IN % ('input_ids', 'FP32', '-1')}", "must be of type INT32, got FP32"),
    "llm: no prompt": (checkpoint, f"{LLM}{IN % ('temperature', 'FP32', '1')}", "neither text_input nor input_ids"),
    "llm: a parameter": (checkpoint, f"{LLM}{parameter('max_num_seqs', 'many')}", "parameter 'max_num_seqs'"),
    "llm: a parser": (checkpoint, f"{LLM}{parameter('tool_call_parser', 'x')}", "tool_call_parser must be one of"),
    "llm: a section of model.yaml": (
        with_file("model.yaml", "pytorch_backend_config: {use_cuda_graph: true}\n"),
        LLM,
        "pytorch_backend_config is no argument",
    ),
    "llm: triton_config": (with_file("model.yaml", "triton_config: {batch: 3}\n"), LLM, "triton_config has no 'batch'"),
    "llm: model.json": (with_file("model.json", "["), LLM, "cannot read"),
    "llm: adapters": (
        with_file("multi_lora.json", "["),
        f"{LLM}{parameter('enable_lora', 'true')}",
        "must be names of adapters with their folders",
    ),
    "llm: no checkpoint": (nothing, LLM, "has no checkpoint in"),
    "llm: no tokenizer": (without_tokenizer, LLM, "tokenizer"),
    "llm: a broken tokenizer": (with_file("tokenizer.json", "{"), LLM, "cannot load the tokenizer of"),
    "llm: defaults of sampling": (with_file("generation_config.json", "["), LLM, "generation_config.json"),
    "llm: a type of model that no graph is for": (of_type("abacus"), LLM, "abacus"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_check_says_what_the_load_says(root: Path, name: str) -> None:
    write, config, words = BROKEN[name]
    (root / "m" / "1").mkdir(parents=True)
    write(root / "m")
    (root / "m" / "config.pbtxt").write_text(config)
    bench = Bench(root)
    (report,) = inspect_repositories([LocalRoot(root)], bench.registry)
    repository = bench.repository()
    await repository.start()
    try:
        loaded = (await failure(repository.load("m"))).message
    finally:
        await repository.close()
    found = [each.message for each in report.errors]
    assert words in loaded
    assert any(each in loaded for each in found), found


async def test_check_says_what_the_load_of_an_ensemble_says(root: Path) -> None:
    step = (
        'model_name: "a" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }'
    )
    config = f'platform: "ensemble"\n{INTS}ensemble_scheduling {{ step [ {{ {step} }} ] }}\n'
    for name, text in (("a", f'backend: "stamp"\n{INTS}'), ("e", f"{config}{parameter('step_parameters.b', 'seed')}")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
        stamp(root / name)
    bench = Bench(root)
    bench.registry.register(EnsembleBackend())
    reports = {each.name: each for each in inspect_repositories([LocalRoot(root)], bench.registry)}
    repository = bench.repository()
    await repository.start()
    try:
        loaded = (await failure(repository.load("e"))).message
    finally:
        await repository.close()
    (error,) = reports["e"].errors
    assert "which no step calls" in error.message
    assert error.message in loaded


async def test_a_backend_that_the_models_name_tells_needs_no_file_of_the_version(root: Path, tmp_path: Path) -> None:
    (root / "my.echo" / "1").mkdir(parents=True)
    (root / "my.echo" / "config.pbtxt").write_text(INTS)
    (tmp_path / "backends" / "echo").mkdir(parents=True)
    (tmp_path / "backends" / "echo" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests): ...\n"
    )
    bench = Bench(root)
    bench.registry.register_missing(find_python_based(tmp_path / "backends"))
    (report,) = inspect_repositories([LocalRoot(root)], bench.registry)
    assert report.errors == ()
    repository = bench.repository()
    await repository.start()
    try:
        await repository.load("my.echo")
        assert repository.find("my.echo").is_ready
    finally:
        await repository.close()
