"""`sluice rag`: a client that puts documents into a running server and asks questions of them."""
