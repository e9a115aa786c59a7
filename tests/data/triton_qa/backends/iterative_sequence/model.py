"""A stand-in for the test backend `iterative_sequence`: counts down from its input, a response for each run."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts down. A request is rescheduled until its sequence reaches 0."""

    def initialize(self, args):
        self._left = {}

    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            first = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1)[0])
            left = self._left.get(key, first) - 1
            self._left[key] = left
            time.sleep(0.5)
            out = pb_utils.Tensor("OUTPUT", np.array([[left]], np.int32))
            sender = request.get_response_sender()
            if left > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(pb_utils.InferenceResponse([out]))
            else:
                self._left.pop(key)
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                sender.send(pb_utils.InferenceResponse([out]), flags=final)
