"""`sluice keys`: makes, shows, rotates and revokes API keys, in the store itself."""
