"""From flags, config.pbtxt and files to the arguments of TensorRT-LLM's LLM class."""
