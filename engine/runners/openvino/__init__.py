"""The CPU runtime: a paged-attention graph built straight from a Hugging Face checkpoint, run by OpenVINO."""

from engine.runners.openvino.runner import OpenVinoRunner, load_runner

__all__ = ["OpenVinoRunner", "load_runner"]
