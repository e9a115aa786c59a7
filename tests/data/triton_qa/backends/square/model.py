"""A stand-in for Triton's square backend: the value of IN, as many times as it says."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends its input as many times as it says. Requests overlap: threads send the responses."""

    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().item()
            threading.Thread(target=_respond, args=(request.get_response_sender(), value)).start()


def _respond(sender, value):
    for _ in range(value):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
