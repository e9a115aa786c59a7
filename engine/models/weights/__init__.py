"""The files of a checkpoint: maps of them, experts in one tensor, names."""
