"""Traces in each format, their errors, and what prompts have in common."""

import json
from pathlib import Path

import pytest

from sluice.engine.simulation.traces import InfiniteCache, TracedRequest, block_hashes, read_trace
from sluice.errors import ErrorCode, SluiceError

OURS = """\
{"at_s": 10.5, "prompt_tokens": 900, "output_tokens": 20, "prefix": [["system", 600], ["tools", 100]]}

{"at_s": 10.0, "prompt_tokens": 8, "output_tokens": 1, "max_tokens": 5, "session": "s", "tenant": "t", "priority": 2}
"""
MOONCAKE = """\
{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]}
{"timestamp": 1500, "input_length": 500, "output_length": 4, "hash_ids": [4]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
LOAD = json.dumps(
    {
        "tool": "sluice load",
        "requests": [
            {
                "intended_s": 3.0,
                "prompt_tokens": None,
                "prompt_tokens_asked": 7,
                "output_tokens": 5,
                "output_tokens_asked": 9,
            },
        ],
    },
    indent=1,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            OURS,
            [
                TracedRequest(0.0, 8, 1, max_tokens=5, session="s", tenant="t", priority=2),
                TracedRequest(0.5, 900, 20, (("system", 600), ("tools", 100))),
            ],
        ),
        (MOONCAKE, [TracedRequest(0.0, 700, 3, (("4", 512), ("9", 188))), TracedRequest(1.0, 500, 4, (("4", 500),))]),
        (BURSTGPT, [TracedRequest(0.0, 472, 18), TracedRequest(113.0, 417, 276)]),
        (LOAD, [TracedRequest(0.0, 7, 5, max_tokens=9)]),
    ],
    ids=["sluice", "mooncake", "burstgpt", "load"],
)
def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path, text: str, expected: list[TracedRequest]) -> None:
    assert read_trace(written(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("", "trace", "trace has no requests"),
        ('{"at_s": 1', "trace", "trace:1: not JSON"),
        (
            '{"at_s": 1}\n[1]',
            "prompt_tokens",
            "trace:1: prompt_tokens is missing; expected a whole number of at least 1",
        ),
        (
            '{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}',
            "at_s",
            "trace:1: at_s is -1; expected a number of at least 0",
        ),
        (
            '{"at_s": 0, "prompt_tokens": "x", "output_tokens": 1}',
            "prompt_tokens",
            "prompt_tokens is 'x'; expected a whole number",
        ),
        (
            '{"at_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": [["a", 6]]}',
            "prefix",
            "prefix has 6 tokens; expected at most 5",
        ),
        (
            '{"at_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix": [["a"]]}',
            "prefix",
            r"prefix has \['a'\]; expected \[name, tokens\]",
        ),
        (
            '{"at_s": 0, "prompt_tokens": 5, "output_tokens": 9, "max_tokens": 8}',
            "max_tokens",
            "max_tokens is 8; expected at least 9",
        ),
        (
            '{"at_s": 0, "prompt_tokens": 5, "output_tokens": 9, "user": 8}',
            "user",
            "unknown field user; there are at_s,",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 9, "hash_ids": "x"}',
            "hash_ids",
            "hash_ids is 'x'; expected a list of whole numbers",
        ),
        ("Timestamp,Model\n1,x", "Request tokens", "no column 'Request tokens'; found Model, Timestamp"),
        (
            "Timestamp,Request tokens,Response tokens\n1,x,1",
            "Request tokens",
            "trace:2: Request tokens is 'x'; expected a whole number",
        ),
        ("{\n}", "trace", "is no report of `sluice load --json`: it has no requests"),
    ],
)
def test_a_wrong_trace_names_place_and_field(tmp_path: Path, text: str, param: str, message: str) -> None:
    with pytest.raises(SluiceError, match=message) as caught:
        read_trace(written(tmp_path, text))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="none cannot be read: No such file"):
        read_trace(tmp_path / "none")


def test_prompts_share_the_blocks_of_equal_beginnings() -> None:
    first = block_hashes(TracedRequest(0.0, 200, 1, (("a", 64), ("b", 70))), 0, 32)
    second = block_hashes(TracedRequest(0.0, 199, 1, (("a", 64), ("b", 70))), 1, 32)
    other = block_hashes(TracedRequest(0.0, 200, 1, (("a", 64), ("c", 70))), 2, 32)
    longer = block_hashes(TracedRequest(0.0, 300, 1, (("a", 64), ("b", 128))), 3, 32)
    assert [len(each) for each in (first, second, other, longer)] == [6, 6, 6, 9]
    assert first[:4] == second[:4] == longer[:4]
    assert first[4:] != second[4:]  # the fifth block ends after what they share
    assert first[:2] == other[:2]
    assert not set(first[2:]) & set(other[2:])


def test_an_infinite_cache_has_all_that_came_before() -> None:
    cache = InfiniteCache()
    assert cache.take(TracedRequest(0.0, 200, 1, (("a", 64), ("b", 70))), 32) == 0
    assert cache.take(TracedRequest(0.0, 200, 1, (("a", 64), ("b", 70))), 32) == 128
    assert cache.take(TracedRequest(0.0, 200, 1, (("a", 64), ("c", 70))), 32) == 64
    assert cache.take(TracedRequest(0.0, 64, 1, (("a", 64),)), 32) == 32  # the last token is always computed
