import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Decoupled: carries out PLAN, a list of words, from a thread of its own.

    "final" ends with the last response, "fail" answers with an error, "stop" ends with an error and the final flag,
    "empty" sends a response without outputs; every other word is sent as it is.
    """

    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            plan = pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy().flatten()[0].decode().split()
            thread = threading.Thread(target=self.carry_out, args=(plan, request.get_response_sender()))
            self.threads.append(thread)
            thread.start()
        return None

    def carry_out(self, plan, sender):
        for step in plan[:-1]:
            sender.send(self.response(step))
        last = plan[-1] if plan else "nothing"
        if last in ("final", "stop"):
            sender.send(self.response(last), flags=FINAL)
            return
        if plan:
            sender.send(self.response(last))
        sender.send(flags=FINAL)

    def response(self, step):
        if step in ("fail", "stop"):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the plan says " + step))
        if step == "empty":
            return pb_utils.InferenceResponse(output_tensors=[])
        word = np.array([[step.encode()]], dtype=np.object_)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("STEP", word)])

    def finalize(self):
        for thread in self.threads:
            thread.join()
