"""Who runs in the next step, who waits, and in which order."""
