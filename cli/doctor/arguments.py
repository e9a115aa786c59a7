"""What `sluice doctor` is told on the command line."""

import argparse

from engine.config import Runtime
from gateway.options.option import OneLineParser

_OVERVIEW = """\
Compare this machine, what is installed on it and the models to be served, and say in one screen what will not work,
what will work badly, and what to do. Nothing is loaded, changed or downloaded.

Without a MODEL it looks at the machine alone: processor, memory, disk, ports, GPUs, driver, CUDA, libraries.
"""

_EPILOG = """\
examples:
  sluice doctor                                          this machine
  sluice doctor /models/llama-3.1-8b                     would this model run here, and on what
  sluice doctor /models/llama-3.1-70b --tensor-parallel-size 4 --runtime tensorrt_llm
  sluice doctor /model-repository                        every language model of a repository
  sluice doctor --json | jq '.findings[] | select(.level == "fail")'

Memory is estimated: the weights' files, two GiB of each GPU for the runtime, and the KV cache that is left.

Exit codes: 0 where all will work, 1 where something will not, 2 for a bad option or a MODEL that is none.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Exits where the arguments cannot be understood, and after --help."""
    parser = OneLineParser(
        prog="sluice doctor",
        usage="sluice doctor [OPTIONS] [MODEL...]",
        description=_OVERVIEW,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folder of a checkpoint, an IR, a compiled engine or a model repository, or ORG/NAME of the hub's cache",
    )
    parser.add_argument(
        "--runtime", type=Runtime, choices=list(Runtime), default=Runtime.AUTO, help="that is to serve; default: auto"
    )
    _add_sizes(parser)
    _add_places(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, for machines")
    return parser.parse_args(argv)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how a MODEL is to be served; as for `sluice serve`")
    group.add_argument("--tensor-parallel-size", "--tp-size", type=_positive, default=1, metavar="N")
    group.add_argument("--pipeline-parallel-size", "--pp-size", type=_positive, default=1, metavar="N")
    group.add_argument("--quantization", default="none", metavar="TYPE")
    group.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE")
    group.add_argument("--engine-python", metavar="PYTHON", help="that TensorRT-LLM is installed for, if another")
    group.add_argument("--max-model-len", type=_positive, metavar="TOKENS")


def _add_places(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the server is to be")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    group.add_argument("--http-port", type=int, default=8000, metavar="PORT")
    group.add_argument("--grpc-port", type=int, default=8001, metavar="PORT")
    group.add_argument("--metrics-port", type=int, default=8002, metavar="PORT")
    group.add_argument("--cache-path", default="~/.cache/sluice", metavar="FOLDER")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
