"""The parts of the stand-in. Nothing here exists in the real package; what the adapter may see is outside of it."""
