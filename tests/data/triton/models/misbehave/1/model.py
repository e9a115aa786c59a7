import numpy as np
import triton_python_backend_utils as pb_utils


def outputs(how):
    """The output tensors of a model that breaks its own configuration in the way named by `how`."""
    n, m = np.array([[1]], np.int32), np.array([[2]], np.int32)
    return {
        "datatype": [pb_utils.Tensor("N", n.astype(np.float32)), pb_utils.Tensor("M", m)],
        "shape": [pb_utils.Tensor("N", np.array([[1, 2, 3]], np.int32)), pb_utils.Tensor("M", m)],
        "rank": [pb_utils.Tensor("N", np.array([1], np.int32)), pb_utils.Tensor("M", m)],
        "batch": [pb_utils.Tensor("N", np.array([[1], [1]], np.int32)), pb_utils.Tensor("M", m)],
        "missing": [pb_utils.Tensor("N", n)],
        "extra": [pb_utils.Tensor("N", n), pb_utils.Tensor("M", m), pb_utils.Tensor("Q", m)],
        "swapped": [pb_utils.Tensor("M", m), pb_utils.Tensor("N", n)],
    }.get(how, [pb_utils.Tensor("N", n), pb_utils.Tensor("M", m)])


class TritonPythonModel:
    """Answers wrongly in the way that HOW names."""

    def answer(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy().flatten()[0].decode()
        if how == "key error":
            return {}["no such key"]
        if how == "error and outputs":
            return pb_utils.InferenceResponse(output_tensors=outputs(how), error=pb_utils.TritonError("both"))
        if how == "text":
            return "not a response"
        if how == "too few":
            return None
        return pb_utils.InferenceResponse(output_tensors=outputs(how))

    def execute(self, requests):
        answers = [self.answer(request) for request in requests]
        return [answer for answer in answers if answer is not None]
