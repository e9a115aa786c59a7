"""RAG over HTTP: collections, the documents in them, and questions to them."""
