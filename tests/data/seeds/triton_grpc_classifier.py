# A published client program, as printed but for the server's address, which comes from the caller.
import tritonclient.grpc as grpcclient
import numpy as np
client = grpcclient.InferenceServerClient(url=ADDRESS)
# Prepare input
input_ids = np.array([[101, 2054, 2003, 1996, 2034, 102]], dtype=np.int64)
inputs = [grpcclient.InferInput("input_ids", input_ids.shape, "INT64")]
inputs[0].set_data_from_numpy(input_ids)
# Inference request
outputs = [grpcclient.InferRequestedOutput("logits")]
result = client.infer(model_name="text_classifier", inputs=inputs, outputs=outputs)
predictions = result.as_numpy("logits")
print(f"Predictions: {predictions}")
