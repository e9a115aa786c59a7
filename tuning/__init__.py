"""Searches server settings and load points: in the simulator, and on servers that it starts and drives."""
