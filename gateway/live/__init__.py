"""What the server does at this moment, sampled while somebody watches."""
