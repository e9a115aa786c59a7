"""The loop around one loaded LLM: who goes in, what comes out, whether it is well."""
