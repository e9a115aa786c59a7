"""Backend `onnxruntime`: ONNX models, run by onnxruntime."""
