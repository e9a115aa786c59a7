"""`sluice rag`: documents into a running server, questions to it."""
