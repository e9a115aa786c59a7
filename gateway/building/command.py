"""`sluice build`: a checkpoint becomes a model repository."""


def command(arguments: list[str]) -> int:
    """Make a model repository of a HuggingFace or NeMo checkpoint."""
    raise NotImplementedError
