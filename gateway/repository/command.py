"""`sluice repository`: look after a model repository without serving it."""

from gateway.repository.arguments import parse


def command(argv: list[str]) -> int:
    """Check a model repository, or prune old versions, without serving."""
    arguments = parse(argv)
    # What they import is wanted only once the options are right.
    if arguments.command == "check":
        from gateway.repository.check import check

        return check(arguments)
    from gateway.repository.prune import prune

    return prune(arguments)
