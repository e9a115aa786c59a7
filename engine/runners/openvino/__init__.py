"""The CPU runtime: OpenVINO runs a paged-attention graph that is built from a Hugging Face checkpoint or an IR."""
