import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Identity of BF16, which numpy has not: the tensor goes through DLPack."""

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X")
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor.from_dlpack("Y", x)])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
