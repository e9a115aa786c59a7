import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Upper case with the configured mark behind it; fails on the word "boom"."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.mark = config["parameters"]["mark"]["string_value"].encode()

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        if text[0] == b"boom":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("cannot shout boom"))
        loud = np.array([text[0].upper() + self.mark], dtype=np.object_)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("LOUD", loud)])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
