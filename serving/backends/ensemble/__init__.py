"""Ensembles: models joined to one by the names of their tensors."""
