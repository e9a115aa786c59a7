"""What backends share whose models are functions of arrays: ONNX, OpenVINO, TorchScript, SavedModel, TensorRT."""
