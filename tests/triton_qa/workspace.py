"""The folder that Triton's QA scripts run in: copies of the tests, generated models, and stand-ins."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import openvino

from sluice.gateway.api.v2.server import PROTOCOL_VERSION
from tests.paths import DATA, ROOT

RECORDER = DATA / "triton_qa" / "recorder"
"""Code that each Python of the tests runs first."""
BACKENDS = DATA / "triton_qa" / "backends"
"""Stand-ins in Python for the C++ backends of the tests."""
RELEASE = "qa"
"""The release by which the scripts name the folder of generated models."""
_IR_VERSION = 10
_SHELL = "#!/bin/bash\n"
_TEXT_SUFFIXES = {".sh", ".py", ".pbtxt", ".json", ".conf"}
_STOP = re.compile(rb"^([ \t]*)set -e\b", re.MULTILINE)
_LIBRARY = re.compile(rb'^default_model_filename: "libtriton_\w+\.so"\n', re.MULTILINE)
"""The file of a backend in C++, in configurations; stand-ins have none."""
_ONNX_SCRIPT = re.compile(r"cat > \$ONNXSCRIPT <<EOF\n(.*?)\nEOF\n", re.DOTALL)
_FOLDER = re.compile(r"^\s*(TRITON_MDLS_QA_\w+)=\$TRITON_MDLS_BLD_DIR/\$TRITON_VERSION/(\S+)$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_ABSENT = ("gdb", "go", "java", "nginx", "node", "npm", "pip", "pip3", "apt-get", "apt", "service", "ldconfig")
"""Commands that the scripts install packages and services with; here they do nothing."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Places below `root`, which has the layout of the image that Triton's own scripts run in."""

    root: Path

    @property
    def qa(self) -> Path:
        return self.root / "qa"

    @property
    def models(self) -> Path:
        return self.root / "data" / RELEASE

    @property
    def commands(self) -> Path:
        return self.root / "commands"

    @property
    def server(self) -> Path:
        return self.root / "opt" / "tritonserver"

    def environment(self, record: Path) -> dict[str, str]:
        """Return the environment of a suite whose outcomes go to the file `record`."""
        return {
            **os.environ,  # noqa: TID251 - a script's commands need PATH and what else the shell has
            "PATH": f"{self.commands}:{self.server / 'bin'}:{os.environ['PATH']}",  # noqa: TID251 - as above
            "PYTHONPATH": f"{RECORDER}:{self.qa / 'common'}",
            "PYTEST_PLUGINS": "qa_recorder",
            "QA_RECORD": str(record),
            "NVIDIA_TRITON_SERVER_VERSION": RELEASE,
            "TRITON_SERVER_VERSION": PROTOCOL_VERSION,
            "TRITON_SERVER_CPU_ONLY": "1",
            "SLUICE_EXIT_ON_ERROR": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


def prepare(checkout: Path, python_backend: Path | None, root: Path) -> Workspace:
    """Fill `root` from a checkout of Triton's server, and one of its Python backend for the examples there."""
    workspace = Workspace(root)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for folder in ("qa", "docs/examples", "src/test"):
        shutil.copytree(checkout / folder, root / folder, symlinks=True)
    if python_backend is not None:
        shutil.copytree(python_backend / "examples", root / "tritonbuild" / "python" / "examples")
    _move_paths(workspace)
    _copy_models(checkout / "Dockerfile.QA", root)
    for model in workspace.qa.glob("*/models/densenet_onnx"):
        shutil.rmtree(model)  # its file would have to be downloaded
    _generate_models(workspace)
    _write_commands(workspace)
    return workspace


def _move_paths(workspace: Workspace) -> None:
    """Point the scripts' absolute paths into the workspace, and let scripts go on after a command that fails."""
    for path in workspace.qa.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix in _TEXT_SUFFIXES:
            text = path.read_bytes()
            moved = text.replace(b"/opt/tritonserver", bytes(workspace.server))
            moved = moved.replace(b"/data/inferenceserver", bytes(workspace.root / "data"))
            if path.suffix == ".sh":
                moved = _STOP.sub(rb"\1set +e", moved)
            moved = _LIBRARY.sub(b"", moved)
            if moved != text:
                path.write_bytes(moved)


def _copy_models(dockerfile: Path, root: Path) -> None:
    """Run what the QA image's recipe copies and makes inside its workspace; compiled files are missing."""
    lines = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith("RUN ") and "qa/" in line:
            for command in re.split(r"&&|;", line.removeprefix("RUN ")):
                words = command.replace("/workspace/", "").split()
                if words and words[0] in ("cp", "mkdir"):
                    subprocess.run(words, cwd=root, check=False, capture_output=True)


def _generate_models(workspace: Workspace) -> None:
    """Run the checkout's generators of ONNX models and of ensembles over them."""
    common = workspace.qa / "common"
    script = (common / "gen_qa_model_repository").read_text(encoding="utf-8")
    found = _ONNX_SCRIPT.search(script)
    if found is None:
        raise SystemExit("gen_qa_model_repository has no script for ONNX models; is this a checkout of a newer Triton?")
    values = {name: str(workspace.models / folder) for name, folder in _FOLDER.findall(script)}
    values |= {"TRITON_MDLS_SRC_DIR": str(common), "ONNX_OPSET": "21"}
    for line in found[1].splitlines():
        if line.startswith("python3 "):
            command = _VARIABLE.sub(lambda name: values[name[1]], line).split()
            _make_folder(command)
            subprocess.run([sys.executable, *command[1:]], cwd=common, check=True, capture_output=True)
    for model in workspace.models.rglob("*bf16*"):
        shutil.rmtree(model, ignore_errors=True)  # onnxruntime's CPU kernels lack the type
    for config in list(workspace.models.glob("*/onnx_*/config.pbtxt")):
        for file in config.parent.glob("*/model.onnx"):
            _lower_ir_version(file)
        for twin in _TWINS:
            _copy_as_twin(config.parent, twin)
    _convert_for_openvino(workspace.models / "qa_model_repository" / "onnx_float32_float32_float32")


def _convert_for_openvino(model: Path) -> None:
    """Convert an ONNX model: those of the checkout's generator are written for an older OpenVINO."""
    converted = model.with_name(model.name.replace("onnx", "openvino", 1))
    shutil.copytree(model, converted)
    config = converted / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace(model.name, converted.name)
    config.write_text(text.replace('platform: "onnxruntime_onnx"', 'backend: "openvino"'), encoding="utf-8")
    for file in converted.glob("*/model.onnx"):
        openvino.save_model(openvino.convert_model(file), file.with_name("model.xml"), compress_to_fp16=False)
        file.unlink()


def _make_folder(command: list[str]) -> None:
    for word in command:
        if word.startswith("--models_dir="):
            Path(word.removeprefix("--models_dir=")).mkdir(parents=True, exist_ok=True)


def _lower_ir_version(file: Path) -> None:
    """Let an older onnxruntime read a model that a newer onnx wrote; the operators are old."""
    model = onnx.load(file)
    model.ir_version = min(model.ir_version, _IR_VERSION)
    onnx.save(model, file)


@dataclass(frozen=True, slots=True)
class _Twin:
    """Names that a runtime without support here has in the tests, under which onnxruntime serves its models."""

    prefix: str
    platform: str
    file: str
    tensors: Mapping[str, str]


_TWINS = (
    _Twin("plan", "tensorrt_plan", "model.plan", {}),
    _Twin(
        "libtorch",
        "pytorch_libtorch",
        "model.pt",
        {
            **{f"OUTPUT{n}": f"OUTPUT__{n}" for n in range(3)},
            "INPUT": "INPUT__0",
            "OUTPUT": "OUTPUT__0",
            "START": "START__1",
            "READY": "READY__2",
            "END": "END__2",
        },
    ),
)


_RESHAPED = "libtorch_nobatch_int32_int32_int32"
"""A TorchScript model whose shapes a suite changes in its configuration; a graph of ONNX fixes them."""


def _copy_as_twin(model: Path, twin: _Twin) -> None:
    """Copy an ONNX model under the names of its twin."""
    stand_in = model.with_name(model.name.replace("onnx", twin.prefix, 1))
    if stand_in.exists():
        return
    shutil.copytree(model, stand_in)
    tensors = dict(twin.tensors)
    if tensors and "_zero_" in stand_in.name:
        tensors |= {f"INPUT{n}": f"INPUT__{n}" for n in range(4)} | {"OUTPUT3": "OUTPUT__3"}
    config = stand_in / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace(model.name, stand_in.name)
    backend = "distributed_addsub" if stand_in.name == _RESHAPED else "onnxruntime"
    lines = f'platform: "{twin.platform}"\nbackend: "{backend}"\ndefault_model_filename: "{twin.file}"'
    text = text.replace('platform: "onnxruntime_onnx"', lines)
    text = re.sub(r'(name|key): "(\w+)"', lambda each: f'{each[1]}: "{tensors.get(each[2], each[2])}"', text)
    config.write_text(text, encoding="utf-8")
    for file in stand_in.glob("*/model.onnx"):
        if tensors:
            _rename_tensors(file, tensors)
        file.rename(file.with_name(twin.file))


def _rename_tensors(file: Path, names: Mapping[str, str]) -> None:
    model = onnx.load(file)
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    onnx.save(model, file)


def _write_commands(workspace: Workspace) -> None:
    """Write the commands that the scripts call by name, and the server where they look for it."""
    for folder in (workspace.commands, workspace.server / "bin", workspace.server / "backends"):
        folder.mkdir(parents=True)
    (workspace.server / "qa").symlink_to(workspace.qa)
    for each in BACKENDS.iterdir():
        shutil.copytree(each, workspace.server / "backends" / each.name)
    shutil.copytree(BACKENDS / "sequence", workspace.server / "backends" / "dyna_sequence")
    for name in ("python", "python3"):
        # Some scripts end after a test that fails: its outcome is recorded.
        _write_command(workspace.commands / name, f'{sys.executable} "$@" || [[ "$*" == *test* ]]')
    for name in _ABSENT:
        _write_command(workspace.commands / name, "exit 0")
    flags = f"--backend-directory={workspace.server / 'backends'} --allow-model-file-override=true"
    serve = f'export PYTHONPATH={ROOT}:{RECORDER}\nexec {sys.executable} -m tests.triton_qa.serve serve {flags} "$@"'
    _write_command(workspace.server / "bin" / "tritonserver", serve)


def _write_command(path: Path, line: str) -> None:
    path.write_text(_SHELL + line + "\n", encoding="utf-8")
    path.chmod(0o755)
