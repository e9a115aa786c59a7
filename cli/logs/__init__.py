"""`sluice logs`: shows the log of a running server, or of a file."""
