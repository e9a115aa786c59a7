"""TensorRT-LLM behind the same protocol as our own executor: configured, fed, cancelled and watched."""
