"""Load generators of others by their own flags: each takes what it can honour, and says what it cannot."""
