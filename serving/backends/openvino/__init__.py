"""Backend `openvino`: models that OpenVINO reads: its IR, ONNX, TensorFlow Lite, PaddlePaddle."""

from sluice.openvino_import import defer_converter

defer_converter()
