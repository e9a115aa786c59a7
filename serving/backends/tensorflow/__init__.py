"""Backend `tensorflow`: SavedModels and frozen graphs, run by OpenVINO. TensorFlow itself is not needed."""
