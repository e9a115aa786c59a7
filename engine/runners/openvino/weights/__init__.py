"""A checkpoint's tensors as graph constants, as they are stored or compressed."""
