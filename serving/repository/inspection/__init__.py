"""What would become of a model repository if it were served, told without serving it."""
