"""Sluice's own executor on torch: CUDA devices, and the CPU. The model families are `sluice.engine.models`; here is
what computes them: kernels, attention over pages, weights on the device, graphs of decode steps."""
