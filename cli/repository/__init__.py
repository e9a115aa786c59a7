"""`sluice repository`: maintains a Triton model repository without serving it."""
