"""The options that say what is in the requests."""

import argparse
from functools import partial
from pathlib import Path

from sluice.load.answers import BUILTIN_SCHEMA, BUILTIN_TOOLS
from sluice.load.config import SecondsRange, TokenRange, TurnRange
from sluice.load.images import image_size
from sluice.load.traces import FORMATS
from sluice.load.values import argument, at_least, json_file, json_object, shape, share, tool_functions


def add_prompts(group: argparse._ArgumentGroup) -> None:
    """Add the options of what prompts and answers are like."""
    lengths = argument(TokenRange.parse)
    group.add_argument("--prompt-tokens", type=lengths, metavar="N|A..B", help="length of prompts (128)")
    group.add_argument(
        "--output-tokens",
        type=lengths,
        default=TokenRange(128, 128),
        metavar="N|A..B",
        help="length of answers (%(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=at_least(2),
        default=4096,
        metavar="N",
        help="draw the token ids of completions prompts below N (%(default)s); their length is exact",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the model's tokenizer.json, for text prompts of exact length (needs the tokenizers package)",
    )
    group.add_argument(
        "--prefix-tokens",
        type=at_least(0),
        default=0,
        metavar="N",
        help="let prompts share their first N tokens, which count in --prompt-tokens (0)",
    )
    group.add_argument(
        "--num-prefixes", type=at_least(1), default=1, metavar="K", help="different shared starts (%(default)s)"
    )
    group.add_argument(
        "--shape",
        type=argument(shape),
        action="append",
        default=[],
        metavar="NAME:D,D,...",
        help="shape of an input of a v2 model, where dimensions vary; repeatable",
    )
    group.add_argument(
        "--extra-body",
        type=argument(json_object),
        default={},
        metavar="JSON",
        help="fields to add to every request; they replace the generator's own",
    )


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options of what is in a run's requests."""
    add_prompts(group)
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of prompts, lengths and arrivals (0)"
    )
    group.add_argument(
        "--allow-eos",
        action="store_true",
        help="let the model stop by itself (no ignore_eos); output lengths are upper bounds",
    )
    group.add_argument(
        "--cancel-share",
        type=argument(share),
        default=0.0,
        metavar="P",
        help="let a part P of the clients (0 to 1) leave at a random token of the answer (0)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send the requests of a trace: " + ", ".join(FORMATS) + "; the content tells which",
    )


def add_content(group: argparse._ArgumentGroup) -> None:
    """Add the options of what requests have besides a prompt."""
    group.add_argument(
        "--turns",
        type=argument(TurnRange.parse),
        default=TurnRange(1, 1),
        metavar="N|A..B",
        help="send sessions of so many turns; each later turn carries those before it and the server's answers, and "
        "--concurrency and --request-rate count sessions (%(default)s)",
    )
    group.add_argument(
        "--think-time",
        type=argument(SecondsRange.parse),
        default=SecondsRange(0.0, 0.0),
        metavar="S|A..B",
        help="seconds from the end of an answer to the next turn (0)",
    )
    group.add_argument(
        "--resend-history",
        action="store_true",
        help="for responses: send the conversation with each turn, rather than name the response before it",
    )
    group.add_argument(
        "--tools",
        type=argument(partial(tool_functions, builtin=BUILTIN_TOOLS)),
        metavar="FILE|builtin",
        help="offer the tools of a JSON file; calls are counted and their arguments validated (implies --allow-eos)",
    )
    group.add_argument("--tool-choice", default="auto", metavar="auto|required|none|NAME", help="with --tools (auto)")
    group.add_argument(
        "--json-schema",
        type=argument(partial(json_file, builtin=BUILTIN_SCHEMA)),
        metavar="FILE|builtin",
        help="ask for answers that meet a JSON schema, and validate them (implies --allow-eos)",
    )
    group.add_argument(
        "--images", type=at_least(0), default=0, metavar="N", help="random PNG images in each turn (%(default)s)"
    )
    group.add_argument(
        "--image-size",
        type=argument(image_size),
        default=(512, 512),
        metavar="WxH",
        help="its pixels (512x512)",
    )
    group.add_argument(
        "--collection", default="sluice", metavar="NAME", help="documents that --api rag asks about (%(default)s)"
    )
