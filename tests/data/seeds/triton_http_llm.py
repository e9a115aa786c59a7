# A published client program, as printed but for what is marked here: the server's address and the tokenizer's folder
# come from the caller; AutoTokenizer, which was not imported, is; and the token ids, which transformers gives as INT64
# and tritonclient refuses for an INT32 tensor, are cast.
import tritonclient.http as tritonhttpclient
import numpy as np
from transformers import AutoTokenizer
client = tritonhttpclient.InferenceServerClient(ADDRESS)
# Проверка доступности
assert client.is_server_live()
assert client.is_model_ready("llama3_8b")
def generate_text(prompt: str, max_tokens: int = 512) -> str:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    input_ids = tokenizer.encode(prompt, return_tensors="np").astype(np.int32)
    inputs = [
        tritonhttpclient.InferInput("input_ids", input_ids.shape, "INT32"),
        tritonhttpclient.InferInput("input_lengths", [1, 1], "INT32"),
        tritonhttpclient.InferInput("request_output_len", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(input_ids)
    inputs[1].set_data_from_numpy(np.array([[input_ids.shape[1]]], dtype=np.int32))
    inputs[2].set_data_from_numpy(np.array([[max_tokens]], dtype=np.int32))
    outputs = [tritonhttpclient.InferRequestedOutput("output_ids")]
    response = client.infer("llama3_8b", inputs, outputs=outputs)
    output_ids = response.as_numpy("output_ids")
    return tokenizer.decode(output_ids[0], skip_special_tokens=True)
