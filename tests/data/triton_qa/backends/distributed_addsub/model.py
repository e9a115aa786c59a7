"""A stand-in for the test backend `distributed_addsub`: sum and difference of two inputs."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds and subtracts."""

    def initialize(self, args):
        self._outputs = [output["name"] for output in json.loads(args["model_config"])["output"]]
        if int(args["model_version"]) > 1:  # later versions of the generated models swap them
            self._outputs.reverse()

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        first, second = (pb_utils.get_input_tensor_by_name(request, f"INPUT{n}").as_numpy() for n in (0, 1))
        values = zip(self._outputs, (first + second, first - second), strict=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in values])
