"""Traces of others, read and sent again."""

import asyncio
import json
from pathlib import Path

import pytest

from sluice.load.config import ApiKind, LoadConfigError, RequestPace, Workload
from sluice.load.options import parser
from sluice.load.run import run_load
from sluice.load.settings import make_config
from sluice.load.traces import ReplayedRequest, read_trace
from sluice.load.workload import due_requests, planned_requests, prompt_source
from tests.load.scripted_server import good_stream, load_config, serving
from tests.load.test_driver import EagerClock

MOONCAKE = """\
{"timestamp": 27000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 24000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 10]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
6,GPT-4,100,0,100,API log
45,ChatGPT,1087,230,1317,Conversation log
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.1805900,396,109
"""
_ASKED = [{"from": "human", "value": "Why is the sky blue?"}, {"from": "gpt", "value": "It is."}]
SHAREGPT = [
    {"id": "answered", "conversations": _ASKED},
    {"id": "unanswered", "conversations": _ASKED[:1]},
]


def written(folder: Path, text: str) -> Path:
    file = folder / "trace"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (
            MOONCAKE,
            [
                ReplayedRequest(0.0, 1100, 6, ((7, 512), (9, 512), (10, 76))),
                ReplayedRequest(3.0, 1000, 5, ((7, 512), (8, 488))),
            ],
        ),
        (BURSTGPT, [ReplayedRequest(0.0, 472, 18), ReplayedRequest(40.0, 1087, 230)]),
        (AZURE, [ReplayedRequest(0.0, 374, 44), ReplayedRequest(3.5, 396, 109)]),
        (json.dumps(SHAREGPT), [ReplayedRequest(None, 6, 2, text="Why is the sky blue?")]),
    ],
    ids=["mooncake", "burstgpt", "azure", "sharegpt"],
)
def test_the_content_tells_the_format(tmp_path: Path, text: str, requests: list[ReplayedRequest]) -> None:
    for read, expected in zip(read_trace(written(tmp_path, text)), requests, strict=True):
        assert read.at_s == pytest.approx(expected.at_s)
        assert (read.prompt_tokens, read.output_tokens) == (expected.prompt_tokens, expected.output_tokens)
        assert (read.pieces, read.text) == (expected.pieces, expected.text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "mooncake .*; burstgpt"),
        ("{\n", ":1: not JSON"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', ":1: input_length is 0"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids is"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", ":2: TIMESTAMP is 'noon'"),
        ("Timestamp,Request tokens,Response tokens\n", "no requests"),
        ("[1]", "conversation 0: expected an object"),
    ],
)
def test_the_place_of_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LoadConfigError, match=message):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(LoadConfigError, match="No such file"):
        read_trace(tmp_path / "nowhere")


def test_prompts_with_equal_pieces_share_their_tokens_and_come_at_their_times(tmp_path: Path) -> None:
    workload = Workload(trace=written(tmp_path, MOONCAKE))
    prompts = prompt_source(ApiKind.COMPLETIONS, workload)
    due = list(due_requests(planned_requests(workload, prompts), RequestPace(replay_speed=2.0), 0))
    assert [offset for offset, _ in due] == [0.0, 1.5]
    (_, first), (_, second) = due
    assert isinstance(first.prompt, list)
    assert isinstance(second.prompt, list)
    assert (len(first.prompt), len(second.prompt)) == (1100, 1000)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]


def test_a_trace_is_sent_at_its_times(tmp_path: Path) -> None:
    settings = {"trace": written(tmp_path, AZURE), "replay_speed": 7.0, "num_requests": None}

    async def scenario() -> list[tuple[float, int]]:
        async with serving(good_stream) as server:
            run = await run_load(load_config(server.url, concurrency=None, **settings), clock=EagerClock())
        return sorted((result.intended_s, result.output_tokens) for result in run.results)

    assert asyncio.run(scenario()) == [(0.0, 44), (0.5, 109)]


def test_the_command_line_replays_unless_it_has_a_pace(tmp_path: Path) -> None:
    trace = str(written(tmp_path, AZURE))
    replayed = make_config(parser().parse_args(["--trace", trace]))
    assert (replayed.pace.replay_speed, replayed.pace.num_requests, replayed.pace.concurrency) == (1.0, 2, None)
    paced = make_config(parser().parse_args(["--trace", trace, "--concurrency", "4"]))
    assert (paced.pace.replay_speed, paced.pace.num_requests, paced.pace.concurrency) == (None, 2, 4)
    with pytest.raises(LoadConfigError, match="--replay-speed goes with --trace"):
        make_config(parser().parse_args(["--trace", trace, "--concurrency", "4", "--replay-speed", "2"]))


def test_a_trace_without_times_needs_a_pace(tmp_path: Path) -> None:
    trace = str(written(tmp_path, json.dumps(SHAREGPT)))
    with pytest.raises(LoadConfigError, match="has no times: add --concurrency or --request-rate"):
        make_config(parser().parse_args(["--trace", trace]))
    workload = make_config(parser().parse_args(["--trace", trace, "--request-rate", "4"])).workload
    (planned,) = planned_requests(workload, prompt_source(ApiKind.CHAT, workload))
    assert planned.prompt == "Why is the sky blue?"
