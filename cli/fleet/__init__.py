"""`sluice fleet`: engines of one model on the nodes of a Ray cluster. Ray places them; it carries no token."""
