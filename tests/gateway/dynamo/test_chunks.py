"""The engine's events, as chunks of Dynamo."""

from sluice.engine.types import EventDetail, FinishReason, TokenEvent, TokenLogprob
from sluice.gateway.dynamo.chunks import ChunkWriter


def test_an_answer_ends_with_its_reason_and_its_usage() -> None:
    writer = ChunkWriter(prompt_tokens=4)
    first = writer.write(TokenEvent(7, [10, 11], None, EventDetail(num_cached_tokens=2)))
    assert first == {"token_ids": [10, 11], "index": 0}
    assert writer.write(TokenEvent(7, [12], FinishReason.STOP)) == {
        "token_ids": [12],
        "index": 0,
        "finish_reason": "stop",
        "completion_usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_cancelled_answer_counts_what_it_had() -> None:
    writer = ChunkWriter(prompt_tokens=4)
    writer.write(TokenEvent(7, [10]))
    chunk = writer.cancelled()
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "cancelled")
    assert chunk["completion_usage"]["completion_tokens"] == 1


def test_log_probabilities_stand_beside_their_tokens() -> None:
    writer = ChunkWriter(prompt_tokens=1)
    logprobs = [TokenLogprob(10, -0.5, [(10, -0.5), (3, -1.0)]), TokenLogprob(11, -4.0, [(5, -0.1), (6, -0.2)])]
    chunk = writer.write(TokenEvent(7, [10, 11], None, EventDetail(logprobs=logprobs)))
    assert chunk["log_probs"] == [-0.5, -4.0]
    assert [[(each["rank"], each["token_id"]) for each in top] for top in chunk["top_logprobs"]] == [
        [(1, 10), (2, 3)],
        [(1, 5), (2, 6), (3, 11)],
    ]


def test_without_alternatives_there_are_none() -> None:
    chunk = ChunkWriter(1).write(TokenEvent(7, [10], None, EventDetail(logprobs=[TokenLogprob(10, -0.5)])))
    assert chunk["log_probs"] == [-0.5]
    assert "top_logprobs" not in chunk


def test_those_of_the_prompt_come_with_the_last_chunk() -> None:
    writer = ChunkWriter(prompt_tokens=2)
    detail = EventDetail(prompt_logprobs=[None, TokenLogprob(8, -2.0, [(9, -0.1)])])
    assert "engine_data" not in writer.write(TokenEvent(7, [10], None, detail))
    last = writer.write(TokenEvent(7, [11], FinishReason.LENGTH))
    assert last["engine_data"] == {"prompt_logprobs": [None, {"9": {"logprob": -0.1}, "8": {"logprob": -2.0}}]}
