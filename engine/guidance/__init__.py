"""Grammars that constrain the output: JSON schema, JSON, regular expression, choice, EBNF."""
