"""Shared by the backends whose libraries compute numpy arrays: onnxruntime, OpenVINO, PyTorch, TensorRT."""
