"""No error tells a client where the server's files lie."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sluice.gateway.front.path_masking import hide_paths
from tests.paths import MODELS
from tests.server_process import ServerProcess, running_command

ONE_INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        with open("/usr/lib/no such file/weights.bin"):
            pass
"""
FAILS_TO_LOAD = (
    "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError(2, 'gone', __file__)\n"
)
REMOTE = 'parameters {{ key: "url" value {{ string_value: "http://127.0.0.1:9/v1" }} }} {}'
KEY_FILE = 'parameters { key: "api_key_file" value { string_value: "/etc/no/such/key" } }'
BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "syntax": ("max_batch_size: : 1", {}),
    "onnx_missing": (f'backend: "onnxruntime" {ONE_INPUT}', {}),
    "onnx_damaged": (f'backend: "onnxruntime" {ONE_INPUT}', {"1/model.onnx": "none"}),
    "openvino_damaged": (f'backend: "openvino" {ONE_INPUT}', {"1/model.xml": "<none", "1/model.bin": ""}),
    "pytorch_damaged": (f'backend: "pytorch" {ONE_INPUT}', {"1/model.pt": "none"}),
    "tensorflow_missing": (f'platform: "tensorflow_savedmodel" {ONE_INPUT}', {"1/model.savedmodel/x": ""}),
    "tensorrt_damaged": (f'platform: "tensorrt_plan" {ONE_INPUT}', {"1/model.plan": "none"}),
    "python_syntax": (f'backend: "python" {ONE_INPUT}', {"1/model.py": "def def"}),
    "python_raises": (f'backend: "python" {ONE_INPUT}', {"1/model.py": FAILS_TO_LOAD}),
    "python_imports": (f'backend: "python" {ONE_INPUT}', {"1/model.py": "import no_such_package"}),
    "python_runs": (f'backend: "python" {ONE_INPUT}', {"1/model.py": PYTHON_MODEL}),
    "python_warm_up": (
        f'backend: "python" {ONE_INPUT} model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value '
        '{ data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "lost" } } }',
        {"1/model.py": PYTHON_MODEL},
    ),
    "labels": (f'backend: "python" {ONE_INPUT[:-2]} label_filename: "lost.txt" }}', {"1/model.py": PYTHON_MODEL}),
    "no_version": (f'backend: "python" {ONE_INPUT}', {}),
    "unknown_backend": (f'backend: "no_such" {ONE_INPUT}', {"1/x": ""}),
    "llm_empty": ('backend: "llm"', {"1/config.json": "{"}),
    "llm_no_type": ('backend: "llm"', {"1/config.json": "{}"}),
    "llm_no_weights": ('backend: "llm"', {"1/config.json": '{"model_type": "qwen3"}'}),
    "llm_elsewhere": (
        'backend: "tensorrtllm" parameters { key: "gpt_model_path" value { string_value: "/opt/no/engine" } }',
        {"1/x": ""},
    ),
    "llm_arguments": ('backend: "vllm"', {"1/model.json": "{", "1/x": ""}),
    "tokenizer": ('backend: "tokenizer"', {"1/tokenizer.json": "{"}),
    "remote_key": (f'backend: "openai" {REMOTE.format(KEY_FILE)}', {"1/x": ""}),
}


def write_repository(root: Path) -> None:
    for name, (config, files) in BROKEN.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        for path, content in files.items():
            (root / name / path).parent.mkdir(exist_ok=True)
            (root / name / path).write_text(content)
    (root / "no_version" / "1").rmdir()
    (root / "llm_no_weights" / "1" / "tokenizer.json").write_bytes((MODELS / "rill/1/tokenizer.json").read_bytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("where the models lie") / "models"
    write_repository(root)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    settings = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "syntax")
    with running_command(log, *settings, "--exit-on-error", "false") as running:
        running.wait_ready()
        yield running


ABSOLUTE = re.compile(r"""(?<![\w:/.])/(?:home|tmp|usr|opt|etc|var|work|root|srv|mnt|dev|proc)\b""")


def check(text: str, root: Path) -> None:
    assert str(root) not in text and str(root.parent) not in text and not ABSOLUTE.search(text), text


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_load_names_no_absolute_path_over_http(
    server: ServerProcess, root: Path, name: str
) -> None:
    with server.client() as client:
        answer = client.post(f"/v2/repository/models/{name}/load", json={})
        check(answer.text, root)
        assert (answer.status_code == 200) == (name == "python_runs"), answer.text
        infer = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        for path in (f"/v2/models/{name}/infer", f"/v2/models/{name}/generate"):
            failed = client.post(path, json=infer)
            assert failed.status_code >= 400
            check(failed.text, root)
        for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/{name}/stats"):
            check(client.get(path).text, root)
        check(client.post("/v1/chat/completions", json={"model": name, "messages": []}).text, root)
        index = client.post("/v2/repository/index").text
        assert name in index
        check(index, root)


@pytest.mark.parametrize("name", ["llm_elsewhere", "onnx_missing", "python_runs"])
def test_a_model_that_cannot_load_names_no_absolute_path_over_grpc(
    server: ServerProcess, root: Path, name: str
) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
        tensor.contents.fp32_contents.append(1.0)
        request = service_pb2.ModelInferRequest(model_name=name, inputs=[tensor])
        load: Any = partial(stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name=name))
        for call in (load, partial(stub.ModelInfer, request)):
            if name == "python_runs" and call is load:
                call()
                continue
            with pytest.raises(grpc.RpcError) as caught:
                call()
            check(str(caught.value), root)
        for message in stub.ModelStreamInfer(iter([request])):
            assert message.error_message
            check(message.error_message, root)
        check(str(stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())), root)


def test_health_overview_and_metrics_name_no_absolute_path(server: ServerProcess, root: Path) -> None:
    with server.client() as client:
        for path in ("/", "/health", "/v1/models", "/v2", "/v2/health/ready", "/openapi.json"):
            check(client.get(path).text, root)
        check(client.get("/", headers={"accept": "text/html"}).text.replace("</", ""), root)
        check(client.get(server.metrics_url).text, root)


def test_the_log_has_the_paths_that_clients_do_not_see(server: ServerProcess, root: Path) -> None:
    before = server.log
    with server.client() as client:
        client.post("/v2/repository/models/labels/load", json={})
    assert server.log.removeprefix(before).count(str(root / "labels" / "lost.txt")) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("unable to find '/srv/models/m/3/model.onnx' for model 'm'", "unable to find 'm/3/model.onnx' for model 'm'"),
        ("/usr/a/m/config.pbtxt:12:3: expected", "m/config.pbtxt:12:3: expected"),
        ("No such file: '/opt/with space/w.bin'", "No such file: 'w.bin'"),
        ("At:\n  /usr/lib/m/1/model.py(33): execute", "At:\n  m/1/model.py(33): execute"),
        ("cannot read /etc/key: denied", "cannot read key: denied"),
        ("no route for /v1/tokenize", "no route for /v1/tokenize"),
        ("at #/properties/usr/lib: no", "at #/properties/usr/lib: no"),
        (
            "see https://host/usr/lib and s3://usr/lib or a/usr/b",
            "see https://host/usr/lib and s3://usr/lib or a/usr/b",
        ),
        ("1/2, and/or, </usr>", "1/2, and/or, </usr>"),
    ],
)
def test_absolute_paths_are_cut_and_nothing_else(text: str, shown: str) -> None:
    text, shown = (each.replace("/srv/", "/usr/") for each in (text, shown))
    assert hide_paths(text) == shown
    assert hide_paths(json.loads(json.dumps(shown))) == shown
