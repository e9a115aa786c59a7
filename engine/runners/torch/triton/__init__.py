"""Kernels in Triton for NVIDIA GPUs. Only code that runs on a CUDA device imports these modules."""
