"""Models that OpenVINO reads: its IR, ONNX, TensorFlow Lite, PaddlePaddle."""
