"""From a request to TensorRT-LLM's SamplingParams."""
