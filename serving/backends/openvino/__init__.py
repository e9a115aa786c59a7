"""Backend `openvino`: models that OpenVINO reads: its IR, ONNX, TensorFlow Lite, PaddlePaddle."""
