"""How models that make vectors of texts are asked, whatever tensors they take and give."""
