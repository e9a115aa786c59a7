"""`sluice build`: from a checkpoint to a model repository that is ready to serve."""
