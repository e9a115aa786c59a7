"""What `sluice rag` is told on the command line."""

import argparse
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from cli.rag.words import (
    DELETE,
    DELETE_EPILOG,
    EPILOG,
    INGEST,
    INGEST_EPILOG,
    LIST,
    LIST_EPILOG,
    OVERVIEW,
    QUERY,
    QUERY_EPILOG,
    SEARCH,
    SEARCH_EPILOG,
)
from gateway.options.config import list_options
from gateway.options.option import OneLineParser
from gateway.options.rag import RagClientOptions

DEFAULT_COLLECTION = "docs"
_Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


@dataclass(frozen=True, slots=True)
class Arguments:
    """`server` by flag, for config.py to read; `of_command` are the command's own, by name."""

    command: str
    server: dict[str, str]
    of_command: dict[str, Any]


def parse(argv: list[str]) -> Arguments:
    """Exits where the arguments cannot be understood, and after --help."""
    parsed = vars(_parser().parse_args(argv))
    command = parsed.pop("command")
    server = {name: value for name, value in parsed.items() if name.startswith("--") and value is not None}
    own = {name: value for name, value in parsed.items() if not name.startswith("--")}
    return Arguments(command, server, own)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice rag",
        usage="sluice rag COMMAND [OPTIONS] ...",
        description=OVERVIEW,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    _add_ingest(commands)
    _add_query(commands)
    _add_search(commands)
    _add_list(commands)
    _add_delete(commands)
    return parser


def _add_ingest(commands: _Commands) -> None:
    parser = _command(commands, "ingest", "PATH...", INGEST, INGEST_EPILOG)
    _add_collection(parser)
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="only files that match, such as '*.md' (by name) or 'guides/*' (by id), whatever their type is. May be "
        "given several times. Default: the types above",
    )
    parser.add_argument("--jobs", type=_jobs, default=4, metavar="N", help="uploads at once. Default: 4")
    parser.add_argument(
        "--prune", action="store_true", help="delete the collection's documents that PATHs have no file for"
    )
    parser.add_argument(
        "--force", action="store_true", help="send what has not changed, too: it is cut and encoded anew"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and change nothing")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder or a file")


def _add_query(commands: _Commands) -> None:
    parser = _command(commands, "query", "QUESTION", QUERY, QUERY_EPILOG)
    _add_asking(parser)
    parser.add_argument("--model", type=_text, metavar="NAME", help="the pipeline that answers. Default: rag_pipeline")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="longest answer, in tokens")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0 for the likeliest answer, up to 2")
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, for machines")


def _add_search(commands: _Commands) -> None:
    parser = _command(commands, "search", "QUESTION", SEARCH, SEARCH_EPILOG)
    _add_asking(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, for machines")


def _add_list(commands: _Commands) -> None:
    parser = _command(commands, "list", "", LIST, LIST_EPILOG)
    parser.add_argument(
        "--collection", type=_text, metavar="NAME", help="list its documents. Without it: all collections"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line on standard output, for machines")


def _add_delete(commands: _Commands) -> None:
    parser = _command(commands, "delete", "(ID... | --all)", DELETE, DELETE_EPILOG)
    _add_collection(parser)
    parser.add_argument("--all", action="store_true", help="delete the collection itself, with all that it holds")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "ids", type=_text, nargs="*", metavar="ID", help="a document, by the id that `sluice rag list` shows"
    )


def _command(commands: _Commands, name: str, operands: str, text: str, epilog: str) -> OneLineParser:
    parser: OneLineParser = commands.add_parser(
        name,
        prog=f"sluice rag {name}",
        usage=f"sluice rag {name} [OPTIONS] {operands}".rstrip(),
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for _, _, declared in list_options(RagClientOptions):
        parser.add_argument(declared.flag, dest=declared.flag, metavar=declared.metavar, help=declared.help)
    return parser


def _add_collection(parser: OneLineParser) -> None:
    parser.add_argument(
        "--collection", type=_text, default=DEFAULT_COLLECTION, metavar="NAME", help=f"Default: {DEFAULT_COLLECTION}"
    )


def _add_asking(parser: OneLineParser) -> None:
    parser.add_argument(
        "--collection",
        type=_text,
        metavar="NAME",
        help=f"Default: {DEFAULT_COLLECTION}; while there is none, Sluice's own documentation",
    )
    parser.add_argument("--top-k", type=_positive, metavar="N", help="how many chunks to look for")
    parser.add_argument("--mode", choices=("vector", "bm25", "hybrid"), help="by meaning, by words, or by both")
    parser.add_argument("--filter", type=_object, metavar="JSON", help="""on metadata: '{"year": {"gte": 2025}}'""")
    parser.add_argument("question", type=_text, metavar="QUESTION")


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got '{text}'")
    return number


def _jobs(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 64, got '{text}'")
    return number


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 2:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2, got {text!r}")
    return number


def _text(text: str) -> str:
    """What can be sent: Python takes bytes of a command line that are no UTF-8 for surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, got {text!r}") from None
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got '{text}'")
    return value
