"""A stand-in for Triton's identity backend: each output is the input of its number, after a delay."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

_PARAMETERS = {"param0": "an example string parameter", "param1": 42, "param2": False}


class TritonPythonModel:
    """Returns inputs as outputs, zeros for those that the request lacks. Parameters are those of the C++ backend."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config.get("parameters", {})
        self._outputs = {each["name"]: each for each in config["output"]}
        values = {name: each["string_value"] for name, each in parameters.items()}
        time.sleep(int(values.get("creation_delay_sec", 0)))
        delay_ms = int(values.get("execute_delay_ms", 0))
        place = int(args["model_instance_name"].rpartition("_")[2])
        self._delay_s = delay_ms / 1000 * max(1, place * int(values.get("instance_wise_delay_multiplier", 0)))

    def execute(self, requests):
        time.sleep(self._delay_s)
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        given = {
            each.name().replace("INPUT", "OUTPUT").replace("input", "output"): each.as_numpy()
            for each in request.inputs()
        }
        outputs = [
            pb_utils.Tensor(name, given[name] if name in given else self._zeros(name))
            for name in request.requested_output_names()
        ]
        return pb_utils.InferenceResponse(outputs, parameters=_PARAMETERS)

    def _zeros(self, name):
        output = self._outputs[name]
        shape = [1, *(max(int(size), 1) for size in output["dims"])]
        return np.zeros(shape, pb_utils.triton_string_to_numpy(output["data_type"]))
