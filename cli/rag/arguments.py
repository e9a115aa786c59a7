"""The command line of `sluice rag`: arguments and help texts."""

import argparse
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from sluice.errors import SluiceError
from sluice.gateway.options.command_line import add_options
from sluice.gateway.options.option import OneLineParser, argument_type, integer, number
from sluice.gateway.options.rag import RagClientOptions
from sluice.pipelines.rag.documents.extract import find_encoding

DEFAULT_COLLECTION = "docs"
_Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"

OVERVIEW = """\
Put documents into the collections of a running server, and ask questions of them.

commands:
  ingest  bring a collection to what files say: Markdown, HTML, PDF, text, JSON lines
  query   answer a question from a collection's documents, with sources
  search  show the passages that may answer a question
  list    show collections, or the documents of one
  delete  delete documents, or a collection
"""

EPILOG = """\
examples:
  sluice serve                                in one terminal, then in another:
  sluice rag ingest handbook/ --collection docs
  sluice rag query "how do I get a refund?" --collection docs

`sluice rag COMMAND --help` explains a command. Keys are better kept in SLUICE_API_KEY and SLUICE_COLLECTION_KEY
than on the command line.
"""

INGEST = """\
Bring a collection to what files say.

Folders are walked: files that end in .md, .markdown, .html, .htm, .xhtml, .pdf, .txt, .rst, .jsonl or .ndjson are
taken; names that begin with a dot and links to folders are not. A document's id is its path below the given folder,
with slashes; a file given by itself is taken whatever it is called, and its id is its name. A line of a .jsonl file is
a document of its own: {"id", "text", "title", "metadata"}.

What the server has already, by its content's hash, is not sent. So the command can be repeated at any time, and goes on
where it was interrupted.
"""

INGEST_EPILOG = """\
examples:
  sluice rag ingest handbook/                       into the collection docs
  sluice rag ingest handbook/ --collection support
  sluice rag ingest handbook/ --prune               and delete documents whose files are gone
  sluice rag ingest . --include '*.md' --include '*.py' --dry-run

--prune deletes every document of the collection that PATHs have no file for (with --include: of those whose ids match),
so give it all folders that feed the collection. It deletes nothing where something could not be read, or where PATHs
have no document at all.

Exit codes: 0 when all is there; 1 where files failed (they are listed) or the server did not answer; 2 for a bad option
or PATH; 130 after Ctrl-C.
"""

QUERY = """\
Answer a question from a collection's documents. The answer is printed as it comes, then the sources it was given:
[1] TITLE > HEADING (DOCUMENT:START-END), with the range in characters.
"""

QUERY_EPILOG = """\
examples:
  sluice rag query "how do I get a refund?"
  sluice rag query "what changed?" --collection support --filter '{"year": {"gte": 2025}}' --top-k 8
  sluice rag query "how do I get a refund?" --json | jq -r .answer

Exit codes: 0 with an answer, 1 where there is none, 2 for a bad option, 130 after Ctrl-C.
"""

SEARCH = """\
Show the passages of a collection that may answer a question, best first, with their scores. No language model is asked.
"""

SEARCH_EPILOG = """\
examples:
  sluice rag search "refund" --mode bm25
  sluice rag search "money back" --top-k 10 --json | jq '.data[].document'

Exit codes: 0 when the server answered, 1 where it did not, 2 for a bad option.
"""

LIST = """\
Show all collections, or with --collection the documents of one.
"""

LIST_EPILOG = """\
examples:
  sluice rag list
  sluice rag list --collection docs
  sluice rag list --collection docs --json | jq -r .id

Exit codes: 0 when the server answered, 1 where it did not, 2 for a bad option.
"""

DELETE = """\
Delete documents: no answer rests on them from then on. With --all the collection itself; a terminal is asked before.
"""

DELETE_EPILOG = """\
examples:
  sluice rag delete guides/old.md
  sluice rag delete --all --collection support

Exit codes: 0 when they are gone, 1 where one was not there or the server did not answer, 2 for a bad option.
"""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed arguments: client options by flag, for `sluice.gateway.options`, and the command's own by name."""

    command: str
    server: dict[str, str]
    of_command: dict[str, Any]


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line. Exits on bad arguments and after --help."""
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
    parser.add_argument(
        "--encoding",
        type=_encoding,
        metavar="LABEL",
        help="of text files that are not UTF-8, and of HTML whatever it declares: windows-1252, gbk, utf-16le and the "
        "other labels of the Encoding Standard. Files with a byte order mark, PDF and JSON lines do not need it",
    )
    parser.add_argument(
        "--jobs", type=argument_type(integer(1, 64)), default=4, metavar="N", help="uploads at once. Default: 4"
    )
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
    parser.add_argument("--max-tokens", type=argument_type(integer(1)), metavar="N", help="longest answer, in tokens")
    parser.add_argument(
        "--temperature", type=argument_type(number(0, 2)), metavar="T", help="0 for the likeliest answer, up to 2"
    )
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
    )
    add_options(parser, (RagClientOptions,))
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
    parser.add_argument("--top-k", type=argument_type(integer(1)), metavar="N", help="how many chunks to look for")
    parser.add_argument("--mode", choices=("vector", "bm25", "hybrid"), help="by meaning, by words, or by both")
    parser.add_argument("--filter", type=_object, metavar="JSON", help="""on metadata: '{"year": {"gte": 2025}}'""")
    parser.add_argument("question", type=_text, metavar="QUESTION")


def _text(text: str) -> str:
    """Check that the argument is UTF-8: Python represents other bytes as surrogates, which cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, got {text!r}") from None
    return text


def _encoding(text: str) -> str:
    try:
        encoding = find_encoding(text)
    except SluiceError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    if not encoding:
        raise argparse.ArgumentTypeError(
            f"must be a label of the Encoding Standard, such as windows-1252, got {text!r}"
        )
    return encoding


def _object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got '{text}'")
    return value
