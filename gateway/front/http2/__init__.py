"""HTTP/2 (RFC 9113) for a server: what gRPC travels in, and nothing of gRPC."""
