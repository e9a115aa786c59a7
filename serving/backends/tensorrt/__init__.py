"""TensorRT plans, which run on NVIDIA GPUs alone. Its libraries are imported when the first plan is loaded."""
