"""Draft tokens: guesses at what comes next, which the model checks many of in one step."""
