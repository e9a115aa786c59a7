import json
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

PATIENCE_S = 30.0
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def said(word):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SAID", np.array([word], np.object_))])


class TritonPythonModel:
    """Holds each request until the file PATH.go exists or the client cancels.

    PATH.started holds this process's id; PATH.cancelled appears once the request says that it is cancelled. A decoupled
    one says "started" first.
    """

    def initialize(self, args):
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        if not self.is_decoupled:
            return [self.hold(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(said("started"))
            sender.send(self.hold(request), flags=FINAL)
        return None

    def hold(self, request):
        path = pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()[0].decode()
        partial = Path(path + ".partial")
        partial.write_text(str(os.getpid()))
        partial.rename(path + ".started")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if request.is_cancelled():
                Path(path + ".cancelled").touch()
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED))
            if Path(path + ".go").exists():
                return said("released")
            time.sleep(0.005)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("nobody came"))
