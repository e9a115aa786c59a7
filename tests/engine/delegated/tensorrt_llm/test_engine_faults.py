"""A lost TensorRT-LLM and what its clients notice: ranks that die, processes that end, loops that hang."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.over_stand_in import (
    StandIn,
    echo,
    failure_of,
    ranks,
    request,
    running,
    tokens,
    until_idle,
)
from tests.waiting import until


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, "1.3.0").set(STEP_MS=2, FAULT_ONCE=tmp_path / "it-happened")


@pytest.mark.parametrize(
    ("version", "fault", "stall_s"), [("1.2.1", "exit_after=150", "600"), ("1.3.0", "hang_after=150", "4")]
)
async def test_streams_go_on_in_the_next_engine(stand_in: StandIn, version: str, fault: str, stall_s: str) -> None:
    stand_in.set(VERSION=version, FAULT=fault)
    prompts = [[10 + i, 3] for i in range(8)]
    async with stand_in.client(runtime_settings={"stall_timeout_s": stall_s}) as client:
        streams = [client.submit(request(prompt, 60)) for prompt in prompts]
        assert await asyncio.gather(*map(tokens, streams)) == [echo(prompt, 60) for prompt in prompts]
        found = client.recoveries
        assert (found.num_restarts, found.num_resumed, found.num_poisoned) == (1, 8, 0)
        await until_idle(client)


@pytest.mark.parametrize(
    ("version", "death"), [("1.2.1", "error"), ("1.3.0", "error"), ("1.2.1", "hang"), ("1.3.0", "exit")]
)
async def test_a_rank_that_is_killed(
    stand_in: StandIn, version: str, death: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Requests of 1.2 wait for ever; the front knows of the rank's end long before a stall would tell."""
    stand_in.set(VERSION=version, RANK_DEATH=death)
    async with stand_in.client(tensor_parallel_size=2, runtime_settings={"stall_timeout_s": "600"}) as client:
        stream = await running(client, request([10, 3], 150), 5)
        old = ranks(client)
        assert old
        old[-1].kill()
        assert await tokens(stream) == echo([10, 3], 150)
        assert client.recoveries.num_restarts == 1
        assert not any(lives(each) for each in old)
    told = [line for line in capfd.readouterr().err.splitlines() if "CRITICAL" in line]
    assert len(told) == (0 if death == "exit" else 1)
    assert all("says that it is not healthy" in line or "cannot go on" in line for line in told)


async def test_a_long_prefill_alone_is_no_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps are longer than the silence that ends the library's statistics, and the prompt than the stall's time."""
    stand_in = StandIn(monkeypatch, tmp_path, "1.2.1").set(STEP_MS=1200)
    async with stand_in.client(
        max_num_batched_tokens=64, max_num_seqs=4, runtime_settings={"stall_timeout_s": "3"}
    ) as client:
        prompt = list(range(100, 300))
        assert await tokens(client.submit(request(prompt, 1))) == echo(prompt, 1)
        assert client.recoveries.num_restarts == 0


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_no_rank_outlives_its_engine(stand_in: StandIn) -> None:
    async with stand_in.client(tensor_parallel_size=4) as client:
        stream = await running(client, request([10, 3], 100), 5)
        family = ranks(client)
        assert len(family) >= 3 and client.info.num_gpus == 4
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        assert await tokens(stream) == echo([10, 3], 100)
        assert not any(lives(each) for each in family)
        family = ranks(client)
    assert family
    assert not any(lives(each) for each in family)


async def test_an_engine_that_says_it_is_ill_is_replaced_while_idle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.3.0")
    async with stand_in.client(tensor_parallel_size=2) as client:
        ranks(client)[-1].kill()
        await until(lambda: client.recoveries.num_restarts == 1)
        assert await tokens(client.submit(request([4], 5))) == echo([4], 5)


async def test_a_request_that_hangs_the_engine_twice_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.3.0").set(FAULT="hang_after=1")  # the warm-up's
    async with stand_in.client(runtime_settings={"stall_timeout_s": "0.6"}) as client:
        error = await failure_of(client.submit(request([5], 30)))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "this request crashed the engine twice")
        assert (client.recoveries.num_restarts, client.recoveries.num_poisoned) in ((1, 1), (2, 1))


@pytest.fixture
def guided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, "1.3.0", has_tokenizer=True).set(FAULT_ONCE=tmp_path / "it-happened")


async def test_a_grammar_is_followed_again_from_the_prompt(guided: StandIn) -> None:
    """The tokens that went out are generated again and must be the same."""
    guided.set(RECORD=guided.record, FAULT="exit_after=60", STEP_MS=2)
    grammar = Grammar(GrammarKind.REGEX, "[a-z]*")
    asked = request([4, 5], 100, grammar=grammar, ignore_eos=False)
    async with guided.client() as client:
        assert await tokens(client.submit(asked)) == echo([4, 5], 100)
        assert client.recoveries.num_restarts == 1
    prompts = [call["prompt_token_ids"] for call in guided.recorded() if "prompt_token_ids" in call]
    assert prompts.count([4, 5]) == 2


async def test_an_answer_that_takes_another_turn_is_an_error(guided: StandIn, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"4,5": list(range(100, 200))}))
    guided.set(SCRIPT=script, STEP_MS=20)
    asked = request([4, 5], 100, grammar=Grammar(GrammarKind.REGEX, "[a-z]*"), ignore_eos=False)
    async with guided.client() as client:
        stream = await running(client, asked, 10)
        script.write_text(json.dumps({"4,5": list(range(101, 201))}))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        error = await failure_of(stream)
        assert (error.code, "another turn" in error.message) == (ErrorCode.INTERNAL, True)
        await until_idle(client)


async def test_shutdown_does_not_wait_for_a_hanging_llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.3.0").set(FAULT="hang_after=10")
    async with stand_in.client(tensor_parallel_size=2) as client:
        stream = client.submit(request([4], 50))
        await until(lambda: len(stream.output_token_ids) >= 5)
        family = [psutil.Process(client.pid), *ranks(client)]
        await client.stop()
        assert not any(lives(each) for each in family)


async def test_an_aborted_request_whose_end_does_not_come_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine is not restarted for a hang that only concerns cancelled requests."""
    stand_in = StandIn(monkeypatch, tmp_path, "1.3.0").set(FAULT="hang_after=10")
    async with stand_in.client(runtime_settings={"stall_timeout_s": "0.5"}) as client:
        stream = client.submit(request([4], 50))
        await until(lambda: len(stream.output_token_ids) >= 5)
        stream.cancel()
        before = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > before + 1.2)
        assert (client.recoveries.num_restarts, client.is_restarting) == (0, False)


async def test_a_launcher_starts_the_engine_and_ends_with_it(stand_in: StandIn, tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-c', 'pass']).returncode or "
        "subprocess.run(sys.argv[1:], process_group=0).returncode)\n"
    )
    async with stand_in.client(tensor_parallel_size=2, launcher=[sys.executable, str(launcher)]) as client:
        stream = await running(client, request([4], 100), 5)
        family = ranks(client)
        assert len(family) >= 2
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        assert await tokens(stream) == echo([4], 100)
        assert not any(lives(each) for each in family)


async def test_a_launcher_that_is_not_there_is_a_load_error(stand_in: StandIn) -> None:
    with pytest.raises(SluiceError, match="cannot be started by no-such-mpirun"):
        async with stand_in.client(launcher=["no-such-mpirun", "-n", "2"]):
            raise AssertionError
