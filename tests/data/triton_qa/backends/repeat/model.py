"""A stand-in for Triton's repeat backend: a response for each element of IN, after its DELAY; WAIT holds the instance."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Repeats elements. Requests overlap: threads send the responses."""

    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
                for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            threading.Thread(target=_respond, args=(sender, values, delays)).start()
            time.sleep(wait[0] / 1000)


def _respond(sender, values, delays):
    for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
        time.sleep(delay / 1000)
        out = pb_utils.Tensor("OUT", np.array([value], values.dtype))
        sender.send(pb_utils.InferenceResponse([out, pb_utils.Tensor("IDX", np.array([index], np.uint32))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
