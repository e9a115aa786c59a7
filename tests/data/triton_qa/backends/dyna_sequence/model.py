"""A stand-in for the test backends `sequence` and `dyna_sequence`: sums of a sequence's inputs."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns the sum of all of a sequence's inputs so far. With END and CORRID inputs the id is added at the end."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._delay_s = int(parameters.get("execute_delay_ms", {"string_value": "0"})["string_value"]) / 1000
        self._sums = {}

    def execute(self, requests):
        time.sleep(self._delay_s)
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        inputs = {each.name(): each.as_numpy() for each in request.inputs()}
        values = inputs["INPUT"]
        key = request.correlation_id()
        total = int(values.sum()) + (0 if inputs["START"].any() else self._sums.get(key, 0))
        if "CORRID" in inputs and inputs["END"].any():
            total += int(inputs["CORRID"].reshape(-1)[0])
        self._sums[key] = total
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.full_like(values, total))])
