"""Access to the server: identities, API keys, tokens of other issuers, and their rights."""
