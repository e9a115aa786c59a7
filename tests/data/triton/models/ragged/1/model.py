import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums each row."""

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        total = rows.sum(axis=1, dtype=np.int64).reshape(-1, 1)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("TOTAL", total)])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
