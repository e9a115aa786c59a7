import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with who asks and all the words of the sequence so far."""

    def initialize(self, args):
        self.words = {}

    def answer(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0]

        who = value("WHO")
        if value("START"):
            self.words[who] = []
        self.words.setdefault(who, []).append(value("WORD"))
        so_far = who + b": " + b" ".join(self.words[who])
        if value("END"):
            del self.words[who]
        output = pb_utils.Tensor("SO_FAR", np.array([[so_far]], dtype=np.object_))
        return pb_utils.InferenceResponse(output_tensors=[output])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
