"""What the stand-in is made of. Nothing here exists in the real package; what the adapter may see is outside of it."""
