"""`sluice smoke`: proves in a minute that a deployment serves each protocol, and says what does not work."""
