"""A checkpoint's tensors as graph constants, either as stored or compressed."""
