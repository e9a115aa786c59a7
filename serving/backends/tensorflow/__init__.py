"""TensorFlow's SavedModels and graphs, run by OpenVINO: TensorFlow itself is not needed."""
