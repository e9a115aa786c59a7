"""Backend `pytorch`: TorchScript models and AOTInductor packages. torch is imported with the first of them."""
