"""Builds the requests to the stages, under their names."""

import numpy as np
import triton_python_backend_utils as pb_utils

PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
PREPARED = {
    "INPUT_ID": "input_ids",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
ASKED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "seed": "seed",
    "beam_width": "beam_width",
    "return_log_probs": "return_log_probs",
    "stream": "streaming",
    "exclude_input_in_output": "exclude_input_in_output",
}
KEPT = ("cum_log_probs", "output_log_probs", "batch_index", "sequence_index")


def renamed(arrays, names):
    """With the batch dimension that a reshape has taken from scalars."""
    return [
        pb_utils.Tensor(names[name], array[np.newaxis] if array.ndim == 1 else array)
        for name, array in arrays.items()
        if name in names
    ]


def ask(model, tensors, outputs):
    response = pb_utils.InferenceRequest(model_name=model, inputs=tensors, requested_output_names=outputs).exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {each.name(): each.as_numpy() for each in response.output_tensors()}


def ask_many(model, tensors, outputs):
    request = pb_utils.InferenceRequest(model_name=model, inputs=tensors, requested_output_names=outputs)
    for response in request.exec(decoupled=True):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        tensors = {each.name(): each.as_numpy() for each in response.output_tensors()}
        if tensors:
            yield tensors
