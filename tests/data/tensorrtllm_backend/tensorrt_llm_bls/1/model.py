"""The three stages called from one Python model; each response goes out as it comes."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from lib.calls import ASKED, KEPT, PREPARED, PREPROCESSING, ask, ask_many, renamed


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        name = parameters["tensorrt_llm_model_name"]["string_value"]
        self.token_model = "tensorrt_llm" if name.startswith("${") or not name else name
        self.accumulates = parameters["accumulate_tokens"]["string_value"].lower() in ("true", "yes", "1", "t")
        self.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        if not self.is_decoupled:
            return [next(iter(self.responses(request))) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            try:
                for response in self.responses(request):
                    sender.send(response)
            except pb_utils.TritonModelException as error:
                sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def responses(self, request):
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        prepared = ask("preprocessing", renamed(given, PREPROCESSING), [*PREPARED])
        tensors = renamed(prepared, PREPARED) + renamed(given, ASKED)
        before = None
        for found in ask_many(self.token_model, tensors, ["output_ids", "sequence_length", *KEPT]):
            tokens, lengths = found["output_ids"], found["sequence_length"]
            if self.accumulates and "stream" in given:
                tokens = tokens if before is None else np.concatenate([before, tokens], 2)
                before, lengths = tokens, np.array([[tokens.shape[2]]], np.int32)
            stage = [pb_utils.Tensor("TOKENS_BATCH", tokens), pb_utils.Tensor("SEQUENCE_LENGTH", lengths)]
            texts = ask("postprocessing", stage, ["OUTPUT"])["OUTPUT"]
            kept = [pb_utils.Tensor(name, found[name]) for name in KEPT if name in found]
            yield pb_utils.InferenceResponse([pb_utils.Tensor("text_output", texts), *kept])
