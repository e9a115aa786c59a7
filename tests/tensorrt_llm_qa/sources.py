"""What NVIDIA's sources say without being imported: the texts that refuse requests, and the llmapi model of Triton."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sluice.engine.delegated.tensorrt_llm.responses import classify
from sluice.errors import ErrorCode
from tests.paths import ROOT
from tests.stand_ins.model_folders import make_checkpoint
from tests.stand_ins.paths import PYTHONPATH
from tests.tensorrt_llm_qa.loading import Checkout, Report

PLACES = (
    "sampling_params.py",
    "llmapi/llm.py",
    "_torch/pyexecutor/sampler.py",
    "_torch/pyexecutor/sampler",
    "_torch/pyexecutor/py_executor.py",
    "_torch/speculative",
)
_CHECKS = (
    "validate_request",
    "_validate",
    "check_logprobs",
    "_check_arguments",
    "rejection_reason",
    "_check_one_model",
)
_AT_SUBMIT = ("sampling_params.py", "llmapi/llm.py")
_CLASSES = {"ValueError": ValueError, "RequestError": type("RequestError", (RuntimeError,), {})}
OTHERS: Mapping[str, str] = {
    "Beam search does not support returning multiple logprobs": "refused before: meant for another of the batch",
    "Beam search only supports returning the sampled logprob": "refused before: meant for another of the batch",
}
"""Beginnings of texts that rightly become an internal error, and why."""
_MODEL = Path("triton_backend", "all_models", "llmapi", "tensorrt_llm")
_RUNTIME = '\nparameters { key: "runtime" value { string_value: "tensorrt_llm" } }\n'


class Text(NamedTuple):
    file: str
    line: int
    kind: str
    text: str


def refusals_blame_the_client(checkout: Checkout, *_: Any) -> Report:
    """A text at which the client is at fault must not become an internal error."""
    report = Report()
    for file, line, kind, text in _refusals(checkout):
        at_submit = file.startswith(_AT_SUBMIT)
        error: Any = _CLASSES[kind if at_submit else "RequestError"](text)
        is_right = classify(error, at_submit=at_submit).error.code is ErrorCode.INVALID or text.startswith((*OTHERS,))
        report.add(None if is_right else f"{file}:{line} becomes an internal error: {text}")
    if not report.num_passed and not report.failures:
        report.add(f"no check of requests is found in {', '.join(PLACES)}")
    return report


def _refusals(checkout: Checkout) -> Iterator[Text]:
    """Yield what checks of requests raise or return as a reason."""
    root = checkout.package
    for place in PLACES:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []:
            name = str(file.relative_to(root))
            tree = ast.parse(file.read_text(encoding="utf-8"))
            constants = {
                target.id: each.value
                for each in tree.body
                if isinstance(each, ast.Assign)
                for target in each.targets
                if isinstance(target, ast.Name)
            }
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef) and any(part in function.name for part in _CHECKS):
                    yield from _texts_of(function, constants, name)


def _texts_of(function: ast.FunctionDef, constants: Mapping[str, ast.expr], file: str) -> Iterator[Text]:
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            kind, value = node.exc.func.id, next(iter(node.exc.args), None)
        elif isinstance(node, ast.Return) and "rejection_reason" in function.name:
            kind, value = "RequestError", node.value
        else:
            continue
        text = "" if value is None else _text(value, constants)
        if kind in _CLASSES and text:
            yield Text(file, node.lineno, kind, text)


def _text(value: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Return a text as a client could see it: values in it are 7."""
    if isinstance(value, ast.Name) and value.id in constants:
        return _text(constants[value.id], {})
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join("7" if isinstance(part, ast.FormattedValue) else _text(part, constants) for part in value.values)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(value.left, constants) + _text(value.right, constants)
    return ""


def template_loads(checkout: Checkout, work: Path, *_: Any) -> Report:
    """Fill NVIDIA's llmapi model in as a user does, and load it on the stand-in."""
    report, repository, source = Report(), work / "models", checkout.root / _MODEL
    if not source.is_dir():
        report.add(f"{_MODEL} is not in the checkout")
        return report
    shutil.rmtree(repository, ignore_errors=True)
    model = shutil.copytree(source, repository / _MODEL.name)
    checkpoint = work / "llmapi"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, with_tokenizer=True)
        (checkpoint / "model.safetensors").touch()
    config, arguments = model / "config.pbtxt", model / "1" / "model.yaml"
    config.write_text(config.read_text().replace('backend: "python"', 'backend: "tensorrtllm"') + _RUNTIME)
    arguments.write_text(re.sub(r"(?m)^model: .*$", f"model: {checkpoint}", arguments.read_text()))
    release = checkout.version.release[:2]
    stand_in = "1.2.1" if release < (1, 3) else "1.3.0" if release < (1, 4) else "1.4.0"
    library = {"PYTHONPATH": f"{PYTHONPATH}:{ROOT}", "STAND_IN_VERSION": stand_in}
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "repository", "check", "--load", "--json", str(repository)],
        env={**os.environ, **library},  # noqa: TID251 - the command needs PATH and more
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    try:
        (found,) = json.loads(done.stdout)["models"]
    except ValueError:
        report.add(f"the check fails: {done.stderr.strip()[-400:]}")
    else:
        report.add(None if found["verdict"] != "error" else "; ".join(map(str, found["errors"])))
        report.notes += map(str, found["notes"])
    return report
