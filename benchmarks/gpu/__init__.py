"""`python -m benchmarks.gpu`, behind `make bench-gpu`: what Sluice does on one GPU.

Each part runs in a process of its own, so that one that fails, hangs or loses the GPU costs no other its result.
Without a GPU, `--tiny --device cpu` runs the same code on small shapes.
"""
