"""`sluice repository`: look after a model repository without serving it."""

from cli.repository.arguments import parse


def command(argv: list[str]) -> int:
    """Check a model repository, or prune old versions, without serving."""
    arguments = parse(argv)
    # What they import is wanted only once the options are right.
    if arguments.command == "check":
        from cli.repository.check import check

        return check(arguments)
    from cli.repository.prune import prune

    return prune(arguments)
