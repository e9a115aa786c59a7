"""Backend `tensorrt`: plans, which run on NVIDIA GPUs alone. TensorRT is imported when the first plan is loaded."""
