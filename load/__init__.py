"""`sluice load`: a load generator for streaming LLM servers."""
