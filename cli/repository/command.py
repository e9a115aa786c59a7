"""`sluice repository`: the command line of `check` and `prune`."""

import argparse

from sluice.gateway.options.option import OneLineParser, argument_type, integer

_OVERVIEW = """\
Maintain a Triton model repository without serving it.

commands:
  check   report what each model would do if it were served: errors, their places and what to write instead
  prune   delete old versions of models
"""

_EPILOG = """\
examples:
  sluice repository check /models
  sluice repository prune --keep 2 --dry-run /models

`sluice repository COMMAND --help` explains a command.
"""

_CHECK = """\
Report what each model of the repositories would do if it were served.

The check reads configurations and folders, and runs no model. It reports fields that are wrong, unknown or not obeyed,
with their lines and what to write instead; tensors, parameters and files of arguments that the backend refuses; models
without versions; versions without their model file; backends that are not installed; tokenizers that cannot be read; of
Python models environments that cannot be used, and imports of modules that their Python lacks; label, warm-up and state
files; ensembles whose members or tensors do not fit; and models of one name in two repositories.

A load asks the same questions and answers them in the same words. It refuses more only for what the check does not
open: weights of language models and of PyTorch and TensorRT models, code of Python models, the library of a language
model's engine, and APIs. --load opens these too.
"""

_CHECK_EPILOG = """\
A model is ok, has notes (it would load, but not everything in its configuration takes effect), or has errors (it would
not load).

examples:
  sluice repository check /models                 before a deployment
  sluice repository check --strict /models        in CI: notes fail too
  sluice repository check --load /models          load every model, then unload it
  sluice repository check --json /models | jq '.models[] | select(.verdict == "error")'
  sluice repository check /models /more-models    ensembles may call models of either repository

Exit codes: 0 where every model would load, 1 where one would not (with --strict: or has notes), 2 for a bad option
or a PATH that is no repository.
"""

_PRUNE = """\
Delete old versions of each model: all but the newest N, except those that its version_policy, or a step of an
ensemble in any of the given repositories, names by number.

A version that only `version_policy: all` (or a `latest` of more than N) serves is deleted, and the table says so. A
model that calls a version by number in its own code cannot be detected: name that version in a version_policy.
"""

_PRUNE_EPILOG = """\
A version leaves its model's folder in one step, before its files are deleted, so that a server that polls the
repository sees all of it or nothing. On a terminal the command asks before it deletes.

examples:
  sluice repository prune --keep 2 --dry-run /models    show the versions and their sizes
  sluice repository prune --keep 2 /models
  sluice repository prune --keep 2 --yes /models        without the question

Exit codes: 0 when done, or when there was nothing to do; 1 where a configuration cannot be read (nothing is deleted
then), a folder cannot be deleted, or the answer was no; 2 for a bad option or a PATH that is no repository.
"""


def command(argv: list[str]) -> int:
    """Check a model repository, or prune old versions, without serving."""
    arguments = parse_arguments(argv)
    # Imported only after the options are checked, to report a bad option at once.
    if arguments.command == "check":
        from sluice.cli.repository.check import check

        return check(arguments)
    from sluice.cli.repository.prune import prune

    return prune(arguments)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits the process for bad arguments and after --help."""
    parser = OneLineParser(
        prog="sluice repository",
        usage="sluice repository COMMAND [OPTIONS] PATH...",
        description=_OVERVIEW,
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    _add_check(commands)
    _add_prune(commands)
    return parser.parse_args(argv)


def _add_check(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    parser = _add_command(commands, "check", _CHECK, _CHECK_EPILOG)
    parser.add_argument("--strict", action="store_true", help="exit with 1 for notes too")
    parser.add_argument("--json", action="store_true", help="write one JSON object to standard output")
    parser.add_argument(
        "--load",
        action="store_true",
        help="also load every model as `sluice serve` would, with the same SLUICE_ variables",
    )
    parser.add_argument(
        "--backend-directory",
        metavar="DIR",
        help="folder of Python-based backends (NAME/model.py), as of `sluice serve`",
    )
    parser.add_argument(
        "--model-namespacing", action="store_true", help="allow models of one name in several repositories"
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a model repository: a folder, or a store's URL")


def _add_prune(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    parser = _add_command(commands, "prune", _PRUNE, _PRUNE_EPILOG)
    parser.add_argument(
        "--keep",
        type=argument_type(integer(1)),
        required=True,
        metavar="N",
        help="number of newest versions of each model to keep",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the versions that would go, and change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a model repository: a folder")


def _add_command(
    commands: "argparse._SubParsersAction[OneLineParser]", name: str, description: str, epilog: str
) -> OneLineParser:
    return commands.add_parser(
        name,
        prog=f"sluice repository {name}",
        usage=f"sluice repository {name} [OPTIONS] PATH...",
        description=description,
        epilog=epilog,
    )
