"""What `sluice repository` is told on the command line."""

import argparse

from gateway.options.option import OneLineParser

_OVERVIEW = """\
Look after a Triton model repository without serving it.

commands:
  check   say what each model would do if it were served: what is wrong, where, and what to write
  prune   delete old versions that nobody asks for
"""

_EPILOG = """\
examples:
  sluice repository check /models
  sluice repository prune --keep 2 --dry-run /models

`sluice repository COMMAND --help` explains a command.
"""

_CHECK = """\
Say what each model of the repositories would do if it were served.

Reads configurations and folders, not the models themselves: fields that are wrong, unknown or not obeyed, with their
lines and what to write; models without versions; versions without their file; label, warm-up and state files;
ensembles whose members or tensors do not fit; models of one name in two repositories.
"""

_CHECK_EPILOG = """\
A model is ok, has notes (it would load, but not everything is as it is written), or has errors (it would not load).

examples:
  sluice repository check /models                 before a deployment
  sluice repository check --strict /models        in CI: notes fail too
  sluice repository check --load /models          load every model for real, then let go of it
  sluice repository check --json /models | jq '.models[] | select(.verdict == "error")'
  sluice repository check /models /more-models    ensembles may call models of either

Exit codes: 0 where every model would load, 1 where one would not (with --strict: or has notes), 2 for a bad option
or a PATH that is no repository.
"""

_PRUNE = """\
Delete old versions: of each model all but the newest N, except those that its version_policy or a step of an
ensemble in any of the given repositories names by number.

What only `version_policy: all` (or a `latest` of more than N) serves is deleted, and the table says so. Models that
call a version by number in their own code cannot be seen: name those versions in a version_policy.
"""

_PRUNE_EPILOG = """\
A version leaves its model's folder in one step before its files are deleted, so that a server that polls the repository
sees all of it or nothing. A terminal is asked before anything is deleted.

examples:
  sluice repository prune --keep 2 --dry-run /models    what would go, and how many bytes
  sluice repository prune --keep 2 /models
  sluice repository prune --keep 2 --yes /models        without the question

Exit codes: 0 when done, or when there was nothing to do; 1 where a configuration cannot be read (nothing is deleted
then), a folder cannot be deleted, or the answer was no; 2 for a bad option or a PATH that is no repository.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Exits where the arguments cannot be understood, and after --help."""
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice repository",
        usage="sluice repository COMMAND [OPTIONS] PATH...",
        description=_OVERVIEW,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    _add_check(commands)
    _add_prune(commands)
    return parser


def _add_check(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    parser = _command(commands, "check", _CHECK, _CHECK_EPILOG)
    parser.add_argument("--strict", action="store_true", help="notes fail too")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, for machines")
    parser.add_argument(
        "--load",
        action="store_true",
        help="load every model for real as well, as `sluice serve` would: the same SLUICE_ variables hold",
    )
    parser.add_argument(
        "--model-namespacing", action="store_true", help="models of one name in several repositories all serve"
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a model repository: a folder, or a store's URL")


def _add_prune(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    parser = _command(commands, "prune", _PRUNE, _PRUNE_EPILOG)
    parser.add_argument(
        "--keep", type=_positive, required=True, metavar="N", help="how many of the newest versions of each model stay"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a model repository: a folder")


def _command(commands: "argparse._SubParsersAction[OneLineParser]", name: str, text: str, epilog: str) -> OneLineParser:
    return commands.add_parser(
        name,
        prog=f"sluice repository {name}",
        usage=f"sluice repository {name} [OPTIONS] PATH...",
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got '{text}'")
    return number
