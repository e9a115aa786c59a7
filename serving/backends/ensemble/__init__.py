"""Backend `ensemble`: models that are joined by the names of their tensors."""
