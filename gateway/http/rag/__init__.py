"""RAG over HTTP: questions to collections, and the documents in them."""
