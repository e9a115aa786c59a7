"""TorchScript models and AOTInductor packages. torch itself is imported when the first of them is loaded."""
