"""From a question to the chunks that may answer it."""
