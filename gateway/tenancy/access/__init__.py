"""Who may ask for what: identities, API keys, tokens of other issuers, and their rights."""
