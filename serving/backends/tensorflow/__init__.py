"""Backend `tensorflow`: SavedModels and frozen graphs, run by OpenVINO. TensorFlow itself is not needed."""

from sluice.openvino_import import defer_converter

defer_converter()
