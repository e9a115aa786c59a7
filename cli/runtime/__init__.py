"""`sluice runtime`: the runtimes there are, and environments for those that need one of their own."""
