"""The rows of the table of settings, by subject. `configuration/settings.py` puts them together."""
