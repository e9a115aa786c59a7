"""The model families: how each reads its `config.json`, and how its decoder computes, against `Kernels`."""
