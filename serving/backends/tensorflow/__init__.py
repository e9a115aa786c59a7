"""Backend `tensorflow`: TensorFlow's SavedModels and frozen graphs, run by OpenVINO. TensorFlow itself is not
needed.
"""
