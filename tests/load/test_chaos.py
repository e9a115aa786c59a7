"""The judgements of a chaos run: how requests ended, and what ledgers, counters and sizes must be."""

import asyncio
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from sluice.load.apis import ParsedEvent, make_api
from sluice.load.chaos import clocks
from sluice.load.chaos.answers import TextReader, WholeApi, find_misshape, text_of
from sluice.load.chaos.clocks import ClockError, MovableClock, build_library
from sluice.load.chaos.faults import FAULTS, Faults, possible_faults
from sluice.load.chaos.fleet import ECHO, PIPELINE, FaultSpan, Fleet, Gateway
from sluice.load.chaos.ledgers import Ledger, compare_completions, count_excused, tokens_of_counters
from sluice.load.chaos.outcomes import Outcome, OutcomeVerdict, Tally, judge
from sluice.load.chaos.processes import Program
from sluice.load.chaos.questions import KINDS, Question, QuestionKind, light_questions, make_questions
from sluice.load.chaos.report import show_progress, verdict
from sluice.load.chaos.run import ChaosConfig, ChaosRun, find_open, schedule
from sluice.load.chaos.samples import (
    FleetSample,
    ProcessSize,
    Size,
    find_growth,
    find_leaks,
    find_slopes,
    sample_interval_s,
    sum_gauges,
)
from sluice.load.chaos.traffic import Completion, Traffic
from sluice.load.config import ApiKind, Workload
from sluice.load.stream import Failure, FailureKind, LiveCounts
from tests.waiting import until

CHAT = Question(QuestionKind(ApiKind.CHAT), 0, "Hi", 4)


def gateway(**marks: Any) -> Gateway:
    return Gateway(Program("near", (), Path("log")), 1, 2, 3, **marks)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"choices": [{"delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"delta": {}}]}, ""),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, "ab"),
        ({"choices": [{"message": {"content": "a"}}]}, "a"),
        ({"choices": [], "usage": {}}, ""),
        ({"type": "response.output_text.delta", "delta": "a"}, "a"),
        ({"type": "response.completed", "response": {"object": "response", "output": []}}, ""),
        ({"object": "response", "output": [{"content": [{"text": "a"}]}, {"type": "reasoning"}]}, "a"),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, "a"),
        ({"type": "message_start", "message": {"content": []}}, ""),
        ({"type": "message", "content": [{"text": "a"}]}, "a"),
        ({"message": {"content": "a"}, "done": False}, "a"),
        ({"text_output": "a"}, "a"),
        ({"outputs": [{"data": ["a"]}]}, "['a']"),
        ({"data": [{"embedding": [1, 2, 3]}]}, "3 numbers"),
        ({"error": {"message": "no"}}, ""),
    ],
)
def test_the_text_of_every_protocol_is_found(document: dict[str, Any], expected: str) -> None:
    assert text_of(json.dumps(document).encode()) == expected


def test_the_text_of_binary_tensors_is_their_bytes() -> None:
    assert text_of(b'{"outputs": [{"parameters": {"binary_data_size": 5}}]}\x01\x00\x00\x00a') == "\x01\x00\x00\x00a"


def test_a_whole_answer_is_asked_for_and_read() -> None:
    api = WholeApi(ApiKind.CHAT)
    body = json.loads(api.body("m", "Hi", 4, Workload()))
    assert (body["stream"], "stream_options" in body) == (False, False)
    assert api.parse(b'{"usage": {"completion_tokens": 4}}').completion_tokens == 4
    assert api.parse(b'{"error": {"message": "no"}}').error == "no"


def test_a_reader_keeps_the_text_of_a_body() -> None:
    reader = TextReader(WholeApi(ApiKind.CHAT), LiveCounts(), must_be_complete=True)
    reader.on_status(200)
    reader.on_body(b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 4}}', 1.0)
    assert reader.find_failure(4, None) is None
    assert reader.text == "a"


def test_a_reader_keeps_the_text_of_messages() -> None:
    reader = TextReader(WholeApi(ApiKind.CHAT), LiveCounts(), must_be_complete=True)
    reader.take(ParsedEvent(text="a"), 1.0)
    reader.take(ParsedEvent(text="b"), 1.0)
    assert reader.text == "ab"


def test_the_text_of_an_event_is_kept_once() -> None:
    reader = TextReader(make_api(ApiKind.MESSAGES), LiveCounts(), must_be_complete=True)
    reader.on_status(200)
    reader.on_body(b'data: {"type": "content_block_delta", "delta": {"text": "a"}}\n\n', 1.0)
    assert reader.text == "a"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (ApiKind.CHAT, '{"error": {"message": "no", "type": "x"}}', '{"error": "no"}'),
        (ApiKind.MESSAGES, '{"type": "error", "error": {"message": "no"}}', '{"error": {"message": "no"}}'),
        (ApiKind.OLLAMA_CHAT, '{"error": "no"}', '{"error": {"message": "no"}}'),
        (ApiKind.INFER, '{"error": "no"}', "no"),
    ],
)
def test_errors_have_the_shape_of_their_protocol(kind: ApiKind, good: str, bad: str) -> None:
    assert find_misshape(kind, 503, good) is None
    assert "503" in (find_misshape(kind, 503, bad) or "")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (None, Outcome.COMPLETED),
        (Failure(FailureKind.CONNECTION, "reset"), Outcome.LOST),
        (Failure(FailureKind.NO_TERMINATOR, "no end"), Outcome.LOST),
        (Failure(FailureKind.TIMEOUT, "no end"), Outcome.HUNG),
        (Failure(FailureKind.SHORT, "3 of 4"), Outcome.WRONG),
        (Failure(FailureKind.MALFORMED, "x"), Outcome.WRONG),
        (Failure(FailureKind.ERROR_EVENT, "unavailable"), Outcome.ERROR),
        (Failure(FailureKind.HTTP, '{"error": {"message": "full"}}', 429), Outcome.ERROR),
        (Failure(FailureKind.HTTP, "full", 429), Outcome.MISSHAPEN),
        (Failure(FailureKind.HTTP, '{"error": {"message": "bug"}}', 500), Outcome.WRONG),
        (Failure(FailureKind.HTTP, '{"error": {"message": "bad"}}', 400), Outcome.WRONG),
    ],
)
def test_each_end_has_its_outcome(failure: Failure | None, expected: Outcome) -> None:
    assert judge(CHAT, "a", failure, "a").outcome is expected


def test_another_text_is_wrong_and_a_first_one_is_learned() -> None:
    assert judge(CHAT, "b", None, "a").outcome is Outcome.WRONG
    assert judge(CHAT, "b", None, None).outcome is Outcome.COMPLETED


def test_an_answer_from_documents_may_say_that_they_are_still_read() -> None:
    said = "I do not know. Documents of collection 'sluice' are being encoded: 3 of 7 chunks so far."
    question = Question(QuestionKind(ApiKind.CHAT, PIPELINE, ends_by_itself=True), 0, "Hi", 4)
    assert judge(question, said, None, "I do not know.").outcome is Outcome.COMPLETED
    assert judge(CHAT, said, None, "I do not know.").outcome is Outcome.WRONG


def test_grpc_tells_a_broken_connection_from_an_engine_that_is_away() -> None:
    question = Question(QuestionKind(ApiKind.GRPC_STREAM), 0, "Hi", 4)
    broken = Failure(FailureKind.CONNECTION, "Socket closed after 3 token events")
    away = Failure(FailureKind.CONNECTION, "the engine is unavailable after 0 token events")
    assert judge(question, "", broken, "a").outcome is Outcome.LOST
    assert judge(question, "", away, "a").outcome is Outcome.ERROR


def test_a_model_that_is_unloaded_may_be_missing() -> None:
    question = Question(QuestionKind(ApiKind.INFER, ECHO, is_streamed=False), 0, "Hi", 4)
    missing = Failure(FailureKind.HTTP, '{"error": "unknown model"}', 404)
    assert judge(question, "", missing, None).outcome is Outcome.ERROR


def test_a_tally_names_what_broke_a_promise() -> None:
    tally = Tally()
    tally.add("chat", OutcomeVerdict(Outcome.COMPLETED), "one")
    tally.add("chat", OutcomeVerdict(Outcome.CUT, "connection", "reset"), "two")
    assert tally.violations() == []
    tally.add("chat", OutcomeVerdict(Outcome.LOST, "connection", "reset"), "three")
    assert tally.violations() == ["1 requests lost: three: connection: reset"]
    assert tally.num_ended == 3


def test_a_run_that_was_interrupted_claims_no_more_than_it_has_seen(tmp_path: Path) -> None:
    run = ChaosRun(ChaosConfig(minutes=1.0, folder=tmp_path, faults=()))
    assert verdict(run).startswith("no promise broken so far; the run did not come to its end")
    run.is_complete = True
    assert verdict(run) == "no promise broken"
    run.violations.append("a request was lost")
    run.is_complete = False
    assert verdict(run) == f"broken promises: 1; see {tmp_path}"


async def test_a_broken_promise_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    run = ChaosRun(ChaosConfig(minutes=1.0, folder=tmp_path, faults=()))
    nobody = Fleet(tmp_path, [], [], None, None, {}, httpx.AsyncClient())
    run.traffic = Traffic(nobody, seed=0)
    run.traffic.tally.add("chat", OutcomeVerdict(Outcome.ERROR, "http_503", "full"), "one")
    run.traffic.tally.add("chat", OutcomeVerdict(Outcome.LOST, "connection", "reset"), "two at 12:00:00")
    shown = io.StringIO()
    showing = asyncio.create_task(show_progress(run, Console(file=shown, soft_wrap=True)))
    await until(lambda: "lost: two at 12:00:00: connection: reset\n" in shown.getvalue())
    showing.cancel()
    assert "one" not in shown.getvalue()


def test_connections_may_break_around_a_kill_alone() -> None:
    killed = gateway(cuts=[FaultSpan(10.0, 12.0)])
    assert killed.may_have_lost(9.0, 11.0)
    assert killed.may_have_lost(11.0, 20.0)
    assert not killed.may_have_lost(5.0, 9.9)
    assert not killed.may_have_lost(12.1, 20.0)
    assert gateway(cuts=[FaultSpan(10.0)]).may_have_lost(50.0, 51.0)


@pytest.mark.parametrize(
    ("ended_at", "outages", "is_excused"),
    [
        (99.0, [], True),
        (90.0, [], False),
        (90.0, [FaultSpan(89.0, 99.0)], True),
        (70.0, [FaultSpan(60.0, 80.0)], False),
    ],
)
def test_a_row_may_be_missing_that_a_kill_took(ended_at: float, outages: list[FaultSpan], is_excused: bool) -> None:
    killed = gateway(cuts=[FaultSpan(100.0, 105.0)], outages=outages)
    completions = {"a": Completion("near", ended_at, 4), "b": Completion("far", 50.0, 4)}
    assert bool(compare_completions(killed, Ledger(), completions)) is not is_excused
    assert count_excused(killed, Ledger(), completions) == 1


def test_rows_must_have_the_tokens_of_the_answers_once() -> None:
    completions = {"a": Completion("near", 1.0, 4), "b": Completion("near", 1.0, None)}
    assert compare_completions(gateway(), Ledger(generated={"a": 4, "b": 9}), completions) == []
    [found] = compare_completions(gateway(), Ledger(generated={"a": 3, "b": 9}), completions)
    assert "a has 3 tokens in place of 4" in found
    [found] = compare_completions(gateway(), Ledger(generated={"a": 4, "b": 9}, twice=["a"]), completions)
    assert "two rows" in found


def test_counters_of_tokens_are_summed_over_models_and_protocols() -> None:
    page = {
        'sluice_tokens_total{kind="generation",model="rill",protocol="grpc"}': 3.0,
        'sluice_tokens_total{kind="generation",model="rill",protocol="openai_chat"}': 4.0,
        'sluice_tokens_total{kind="prompt",model="rill",protocol="grpc"}': 5.0,
        'sluice_requests_total{kind="generation"}': 9.0,
    }
    assert tokens_of_counters(page) == {"generated_tokens": 7.0, "prompt_tokens": 5.0}


def test_what_is_still_held_is_found() -> None:
    still = {'sluice_kv_blocks{model="m"}': 8.0, 'sluice_kv_blocks_free{model="m"}': 8.0, "sluice_ledger_failing": 0.0}
    assert find_open(still) == ""
    assert "7 of 8 KV blocks" in find_open(still | {'sluice_kv_blocks_free{model="m"}': 7.0})
    assert "waiting" in find_open(still | {'sluice_sequences_waiting{model="m"}': 1.0})


def test_growth_beyond_the_bound_is_found() -> None:
    before = {"gateway near": Size(200.0, 10, 50)}
    assert find_growth(before, {"gateway near": Size(360.0, 18, 80), "new": Size(900.0, 90, 900)}) == []
    assert len(find_growth(before, {"gateway near": Size(365.0, 19, 83)})) == 3
    assert find_growth(before, {}) == ["gateway near is gone"]


def test_a_schedule_is_the_seeds_and_has_every_fault_before_one_again() -> None:
    faults = list(schedule(7, FAULTS, 600.0, 6.0))
    assert faults == list(schedule(7, FAULTS, 600.0, 6.0)) != list(schedule(8, FAULTS, 600.0, 6.0))
    assert {each.name for each in faults[: len(FAULTS)]} == set(FAULTS)
    assert [each.at_s for each in faults] == sorted(each.at_s for each in faults)


def test_faults_of_missing_parts_are_left_out() -> None:
    assert {"redis_kill", "launcher_kill"}.isdisjoint(possible_faults(FAULTS, {"redis": "none"}))
    assert "clock_jump" not in possible_faults(FAULTS, {"clocks": "none"})
    assert possible_faults(FAULTS, {}) == FAULTS
    assert all(getattr(Faults, f"fault_{name}").__doc__ for name in FAULTS)


def test_every_protocol_is_asked_whole_and_streamed() -> None:
    asked = {each.kind.api for each in make_questions()}
    assert asked >= set(ApiKind) - {ApiKind.RERANK, ApiKind.RAG}
    assert len({each.name for each in KINDS}) == len(KINDS)


def test_light_questions_bring_few_tokens_and_each_protocol_of_classic_models() -> None:
    light = light_questions(make_questions())
    assert {each.kind.api for each in light} == {
        *(ApiKind.COMPLETIONS, ApiKind.EMBEDDINGS, ApiKind.INFER, ApiKind.INFER_BINARY, ApiKind.GRPC_INFER)
    }
    assert max(each.max_tokens for each in light) <= 4
    assert not any(each.kind.is_streamed for each in light)


def samples(*sizes_mb: float, every_s: float = 60.0) -> list[FleetSample]:
    processes = ([ProcessSize("gateway near", 7, Size(each, 10, 50))] for each in sizes_mb)
    return [FleetSample(number * every_s, {}, 0, each, {}) for number, each in enumerate(processes)]


def test_memory_that_grows_steadily_is_found() -> None:
    [slope] = find_slopes(samples(*(300 + 2.5 * minute for minute in range(40))))
    assert (slope.part, slope.pid, slope.minutes, slope.mb_per_hour) == ("gateway near", 7, 26.0, 150.0)
    [found] = find_leaks([slope])
    assert "gateway near (pid 7) grew by 150 MB an hour over 26 minutes" in found


def test_memory_that_settles_or_swings_is_no_leak() -> None:
    settles = samples(*(200 + min(minute, 12) * 10 for minute in range(40)))
    swings = samples(*(200 + minute % 2 * 80 + minute for minute in range(40)))
    brief = samples(*(200 + 5 * minute for minute in range(14)))
    assert find_leaks([*find_slopes(settles), *find_slopes(swings), *find_slopes(brief)]) == []
    assert find_slopes(samples(1, 2, 3)) == []


def test_a_process_in_place_of_another_is_measured_by_itself() -> None:
    first = samples(*([400] * 20))
    second = [ProcessSize("gateway near", 8, Size(200, 10, 50))]
    later = [FleetSample(1200.0 + 60 * number, {}, 0, second, {}) for number in range(20)]
    assert [each.mb_per_hour for each in find_slopes([*first, *later])] == [0.0, 0.0]


def test_a_run_has_samples_however_short_it_is() -> None:
    assert (sample_interval_s(60.0), sample_interval_s(8 * 3600.0)) == (6.0, 60.0)
    found = sum_gauges({'sluice_kv_blocks_used{model="a"}': 3.0, 'sluice_kv_blocks_used{model="b"}': 4.0, "other": 1.0})
    assert (found["blocks_used"], found["running"]) == (7.0, 0.0)


_SPIN = """
import os, threading, time
for _ in range(200):  # what waits and what forks at the same time
    waiting = threading.Thread(target=threading.Event().wait, args=(0.001,))
    waiting.start()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    waiting.join()
began = time.monotonic()
time.sleep(0.05)
print(time.time(), time.monotonic() - began)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("offset_s", [-86_400, 0, 3600])
def test_a_clock_moves_for_the_processes_that_have_it(tmp_path: Path, offset_s: float) -> None:
    clock = MovableClock(build_library(tmp_path), tmp_path / "clock")
    clock.move(offset_s)
    command, environment = (sys.executable, "-c", _SPIN), dict(clock.environment)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    told, slept = map(float, done.stdout.split())
    assert abs(told - offset_s - time.time()) < 1800
    assert 0.05 <= slept < 1800


@pytest.mark.slow  # it calls the compiler
def test_what_is_missing_to_move_clocks_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "_SOURCE", tmp_path / "none.c")
    if shutil.which("cc"):
        with pytest.raises(ClockError, match=r"(?s)none\.c cannot be compiled: .*apt-get install gcc"):
            build_library(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClockError, match=r"no C compiler in PATH; install .*apt-get install gcc"):
        build_library(tmp_path)
