"""Token ids to text, with a tokenizer of transformers. It sees each response of a stream alone."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])
        skipped = parameters.get("skip_special_tokens", {}).get("string_value", "").lower()
        self.skips_special = skipped not in ("false", "0", "f", "n", "no")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.output(request)]) for request in requests]

    def output(self, request):
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        texts = [
            self.tokenizer.decode(ids[:length], skip_special_tokens=self.skips_special).encode()
            for row, lengths in zip(given["TOKENS_BATCH"], given["SEQUENCE_LENGTH"])
            for ids, length in zip(row, lengths)
        ]
        # One dimension for rows and beams, as NVIDIA's stage has it.
        return pb_utils.Tensor("OUTPUT", np.array(texts, object))
