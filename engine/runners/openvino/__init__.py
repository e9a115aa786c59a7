"""The CPU runtime: a paged-attention graph built straight from a Hugging Face checkpoint, run by OpenVINO."""
