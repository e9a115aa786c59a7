"""Code shared by the backends whose libraries compute numpy arrays in this process: onnxruntime, OpenVINO, PyTorch,
TensorRT.
"""
