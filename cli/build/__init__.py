"""`sluice build`: makes a model repository that is ready to serve from a checkpoint."""
