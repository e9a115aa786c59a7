"""Which requests are recorded and kept, and profiles of the server."""
