"""`sluice doctor`: what will work on this machine and what will not."""


def command(arguments: list[str]) -> int:
    """Say what of this machine, its libraries and a model will not work, and what to do."""
    raise NotImplementedError
