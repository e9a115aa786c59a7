"""The CPU runtime: a paged-attention graph built straight from a Hugging Face checkpoint, run by OpenVINO."""

from sluice.openvino_import import defer_converter

defer_converter()
