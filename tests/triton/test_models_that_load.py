"""Models that load others while they are loaded themselves, where one load at a time is allowed."""

from pathlib import Path

import httpx

from tests.triton.server import serving

CONFIG = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        name, number = args["model_name"].split("_")
        if int(number):
            pb_utils.load_model(f"{name}_{int(number) - 1}")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(each, "TEXT")]) for each in requests]
"""


def test_a_chain_of_models_loads_with_one_slot(tmp_path: Path) -> None:
    for number in range(3):
        version = tmp_path / "models" / f"chain_{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG)
    flags = ("--model-control-mode=explicit", "--model-load-thread-count=1", "--load-model=chain_2")
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        for number in range(3):
            assert httpx.get(f"{server.base_url}/v2/models/chain_{number}/ready").status_code == 200
