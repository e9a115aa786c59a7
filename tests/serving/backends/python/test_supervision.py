"""Workers that crash, hang, or are closed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from sluice import backoff
from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python import supervisor
from sluice.serving.backends.python.backend import create_instances, create_workers, initialize_command
from sluice.serving.backends.python.batch_queue import MAX_WAIT_S, WorkerBatchQueue
from sluice.serving.backends.python.environments import WorkerLaunch
from sluice.serving.backends.python.supervisor import SupervisedWorker
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.instance import place_instances
from sluice.serving.model import Model, infer_one
from sluice.serving.spec import ModelSource
from tests import paths
from tests.serving.backends.builders import infer_stream
from tests.serving.backends.python.parts import (
    DECOUPLED,
    TEXT,
    ask,
    children,
    context,
    is_alive,
    loaded,
    source_of,
    stream,
    text_of,
    text_request,
    write_model,
)
from tests.waiting import until

FATAL = """
class TritonPythonModel:
    def initialize(self, args):
        if os.path.exists(os.path.join(args["model_repository"], "broken")):
            raise RuntimeError("broken since")

    def execute(self, requests):
        for request in requests:
            word = text_of(request)
            if word == "exit":
                os._exit(3)
            elif word == "child":
                import subprocess
                return [text(subprocess.Popen(["sleep", "1000"]).pid)]
            elif word == "forever":
                time.sleep(1000)
        return [text(os.getpid()) for _ in requests]
"""


@asynccontextmanager
async def supervised(source: ModelSource, **limits: float) -> AsyncIterator[tuple[Model, list[SupervisedWorker]]]:
    placements = place_instances(source.config, 0)
    finalize_timeout_s = limits.get("finalize_timeout_s", supervisor.FINALIZE_TIMEOUT_S)
    held = WorkerBatchQueue(source.name, limits.get("max_wait_s", MAX_WAIT_S))
    workers = [
        SupervisedWorker(
            initialize_command(source, each, str(source.model_file)),
            WorkerLaunch(),
            context(),
            held,
            finalize_timeout_s,
        )
        for each in placements
    ]
    await asyncio.gather(*(worker.start() for worker in workers))
    model = ScheduledModel(source, create_instances(workers, placements, workers, can_queue_ahead=True))
    try:
        yield model, workers
    finally:
        await model.close()


async def error_of(model: Model, text: str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await infer_one(model, text_request(text))
    return caught.value


async def test_a_dead_worker_fails_its_request_and_is_replaced(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "fatal", FATAL)) as model:
        before = await ask(model, "")
        error = await error_of(model, "exit")
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "Stub process 'fatal_0' is not healthy.")
        assert not model.is_ready
        after = await ask(model, "")  # held until the next worker is up
        assert after != before
        assert model.is_ready
        assert children() == {int(after)}


async def test_other_instances_go_on_meanwhile(tmp_path: Path) -> None:
    source = write_model(tmp_path / "fatal", FATAL, "instance_group { count: 2 }" + TEXT)
    async with supervised(source) as (model, workers):
        first, second = workers
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not first.is_ready)
        for _ in range(5):
            assert await ask(model, "") == str(second.pid)
        assert model.is_ready
        await until(lambda: first.is_ready)
        assert {await ask(model, "") for _ in range(8)} == {str(first.pid), str(second.pid)}


QUEUE = """
class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        word = text_of(requests[0])
        with open(os.path.join(self.folder, "seen"), "a") as file:
            file.write(word + " ")
        if word == "first":
            while not os.path.exists(os.path.join(self.folder, "go")):
                time.sleep(0.001)
            os._exit(1)
        return [text(word) for _ in requests]
"""


async def test_what_the_model_has_not_seen_is_done_by_the_next_worker(tmp_path: Path) -> None:
    """Batches wait in the processes behind those that end them."""
    source = write_model(tmp_path / "queue", QUEUE, "instance_group { count: 2 }" + TEXT)
    async with supervised(source) as (model, workers):
        for worker in workers:
            worker._execution_ns = 1.0
        firsts = []
        for number in (1, 2):  # both are busy, or the other one would take them all
            firsts.append(asyncio.ensure_future(ask(model, "first")))
            await until(lambda number=number: seen(source) == ["first"] * number)
        others = [asyncio.ensure_future(ask(model, f"w{number}")) for number in range(5)]
        await until(lambda: sum(worker.num_batches for worker in workers) == 7)
        (source.folder / "go").touch()
        for first in firsts:
            with pytest.raises(SluiceError, match="not healthy"):
                await first
        assert await asyncio.gather(*others) == [f"w{number}" for number in range(5)]
    assert sorted(seen(source)) == ["first"] * 2 + [f"w{number}" for number in range(5)]


def seen(source: ModelSource) -> list[str]:
    path = source.folder / "seen"
    return path.read_text().split() if path.exists() else []


async def test_what_is_held_is_done_by_whichever_is_up_first(tmp_path: Path) -> None:
    """Both workers are lost, and one of them never comes back."""
    code = FATAL.replace(
        "    def execute",
        """
        if os.path.exists(os.path.join(args["model_repository"], "slow")) and args["model_instance_name"][-1] == "0":
            time.sleep(1000)

    def execute""",
        1,
    )
    source = write_model(tmp_path / "fatal", code, "instance_group { count: 2 }" + TEXT)
    async with supervised(source, finalize_timeout_s=0.1) as (model, workers):
        (source.folder / "slow").touch()
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not any(worker.is_ready for worker in workers))
        answers = await asyncio.gather(*(ask(model, "") for _ in range(4)))
        assert set(answers) == {str(workers[1].pid)}
        assert not workers[0].is_ready


async def test_a_sequences_worker_keeps_what_is_its_own(tmp_path: Path) -> None:
    sequences = "sequence_batching { }\ninstance_group { count: 2 }"
    source = write_model(tmp_path / "fatal", FATAL, sequences + TEXT)
    placements = place_instances(source.config, 0)
    without = source_of(source.folder, 'backend: "python"' + TEXT)
    shared, script = WorkerBatchQueue("fatal"), (str(source.model_file), "")
    first, second, *others = [
        worker
        for each in (source, without)
        for worker in create_workers(each, placements, [WorkerLaunch(), WorkerLaunch()], context(), script, shared)
    ]
    assert first._queue is not second._queue
    assert [each._queue for each in others] == [shared, shared]


async def test_open_streams_of_a_dead_worker_end_in_an_error(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                self.kept = []

            def execute(self, requests):
                for request in requests:
                    request.get_response_sender().send(text("begun"))
                    self.kept.append(request)
                    if text_of(request) == "exit":
                        os._exit(1)
    """
    async with loaded(write_model(tmp_path / "streams", code, DECOUPLED)) as model:
        opened = infer_stream(model, text_request(""))
        assert text_of(await anext(opened)) == "begun"
        assert await stream(model, "exit") == ["begun", "<Stub process 'streams_0' is not healthy.>"]
        [end] = [each async for each in opened]
        assert end.is_final
        assert end.error is not None


async def test_what_a_model_started_ends_with_its_worker(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "fatal", FATAL)) as model:
        crashed, closed = int(await ask(model, "child")), 0
        assert is_alive(crashed)
        await error_of(model, "exit")
        await until(lambda: not is_alive(crashed))
        closed = int(await ask(model, "child"))
        assert is_alive(closed)
    await until(lambda: not is_alive(closed))


async def test_a_process_that_the_model_forked_does_not_answer_for_it(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                if text_of(requests[0]) == "fork":
                    pid = os.fork()
                    if pid == 0:
                        sys.exit(5)
                    os.waitpid(pid, 0)
                return [text(os.getpid()) for _ in requests]
    """
    async with loaded(write_model(tmp_path / "forking", code)) as model:
        pid = await ask(model, "")
        for _ in range(3):
            assert await ask(model, "fork") == pid


async def test_a_signal_to_everybody_leaves_the_worker_to_the_gateway(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "fatal", FATAL)) as model:
        pid = int(await ask(model, ""))
        os.kill(pid, signal.SIGTERM)
        assert await ask(model, "") == str(pid)


async def test_it_is_given_up_where_it_cannot_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.001)
    source = write_model(tmp_path / "fatal", FATAL)
    async with supervised(source) as (model, _):
        (source.folder / "broken").touch()
        await error_of(model, "exit")
        error = await error_of(model, "")
        assert error.code is ErrorCode.UNAVAILABLE
        assert "RuntimeError: broken since" in error.message
        assert not model.is_ready
        assert (await error_of(model, "")).code is ErrorCode.UNAVAILABLE
    assert any(each.levelname == "CRITICAL" for each in caplog.records)


def _is_other(worker: SupervisedWorker, pid: int) -> bool:
    return worker.is_ready and worker.pid != pid


async def test_a_worker_that_ran_for_long_is_worth_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(supervisor, "STABLE_S", 0.0)
    async with supervised(write_model(tmp_path / "fatal", FATAL)) as (model, (worker,)):
        for _ in range(backoff.MAX_FUTILE_STARTS + 1):
            pid = worker.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(partial(_is_other, worker, pid))
        assert await ask(model, "")


async def test_crashing_requests_end_nothing_while_others_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.001)
    async with loaded(write_model(tmp_path / "fatal", FATAL)) as model:
        for _ in range(7):
            assert (await error_of(model, "exit")).code is ErrorCode.INTERNAL
            assert await ask(model, "")


async def test_a_held_request_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    code = (
        FATAL
        + """
    if os.path.exists("{flag}"):
        time.sleep(1000)
""".replace("{flag}", str(tmp_path / "slow"))
    )
    source = write_model(tmp_path / "fatal", code)
    async with supervised(source, max_wait_s=0.05, finalize_timeout_s=0.1) as (model, _):
        (tmp_path / "slow").touch()
        await error_of(model, "exit")
        error = await error_of(model, "")
        assert error.code is ErrorCode.UNAVAILABLE
        assert error.message == "fatal was not restarted within 0.05 s"


async def test_finalize_is_called_and_cut_short(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                self.folder = args["model_repository"]

            def execute(self, requests):
                self.hangs = text_of(requests[0]) == "hang"
                return [text("x") for _ in requests]

            def finalize(self):
                open(os.path.join(self.folder, "finalized"), "w").close()
                if self.hangs:
                    time.sleep(1000)
    """
    source = write_model(tmp_path / "final", code)
    async with supervised(source, finalize_timeout_s=0.2) as (model, (worker,)):
        await ask(model, "")
    assert (source.folder / "finalized").exists()
    async with supervised(source, finalize_timeout_s=0.2) as (model, (worker,)):
        await ask(model, "hang")
        pid = worker.pid
    assert pid is not None
    assert not is_alive(pid)


async def test_closing_fails_what_is_under_way(tmp_path: Path) -> None:
    source = write_model(tmp_path / "fatal", FATAL)
    async with supervised(source, finalize_timeout_s=0.05) as (model, (worker,)):
        await ask(model, "")
        under_way = asyncio.ensure_future(ask(model, "forever"))
        await until(lambda: worker.num_batches == 1)
        await model.close()
        with pytest.raises(SluiceError) as caught:
            await under_way
        assert caught.value.code is ErrorCode.UNAVAILABLE
        await model.close()
    assert not children()


async def test_a_load_that_is_called_off_leaves_nothing(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                time.sleep(1000)

            def execute(self, requests): ...
    """

    async def load() -> None:
        async with loaded(write_model(tmp_path / "slow", code, "instance_group { count: 2 }" + TEXT)):
            raise AssertionError("it cannot be loaded")

    task = asyncio.ensure_future(load())
    await until(lambda: len(children()) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not children()


GATEWAY = """
import asyncio, sys
from pathlib import Path
from tests.serving.backends.python.parts import ask, loaded, source_of

async def main():
    async with loaded(source_of(Path(sys.argv[1]), 'backend: "python"' + sys.argv[2])) as model:
        print(await ask(model, ""), flush=True)
        await ask(model, "forever")

asyncio.run(main())
"""


async def test_a_worker_whose_gateway_is_killed_ends_itself(tmp_path: Path) -> None:
    write_model(tmp_path / "fatal", FATAL)
    arguments = (sys.executable, "-c", GATEWAY, str(tmp_path / "fatal"), TEXT)
    root = paths.ROOT
    gateway = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE, cwd=root)
    assert gateway.stdout is not None
    worker = int(await gateway.stdout.readline())
    assert is_alive(worker)
    gateway.kill()
    await gateway.communicate()
    await until(lambda: not is_alive(worker))


def lookahead(execution_ns: float) -> Callable[[SupervisedWorker], int]:
    def depth(worker: SupervisedWorker) -> int:
        worker._execution_ns = execution_ns
        return worker.depth

    return depth


async def test_fast_models_are_given_batches_ahead_and_slow_ones_none(tmp_path: Path) -> None:
    async with supervised(write_model(tmp_path / "fatal", FATAL)) as (_, (worker,)):
        assert lookahead(1e9)(worker) == 1
        assert lookahead(250_000)(worker) == 5
        assert lookahead(1)(worker) == 1 + supervisor.MAX_LOOKAHEAD


async def test_batches_ahead_go_to_the_worker_with_the_fewest(tmp_path: Path) -> None:
    source = write_model(tmp_path / "fatal", FATAL, "instance_group { count: 2 }" + TEXT)
    async with supervised(source, finalize_timeout_s=0.05) as (model, workers):
        for worker in workers:
            worker._execution_ns = 1.0
        asked = [asyncio.ensure_future(ask(model, "forever")) for _ in range(7)]
        await until(lambda: sum(worker.num_batches for worker in workers) == 7)
        assert sorted(worker.num_batches for worker in workers) == [3, 4]
        await model.close()
        await asyncio.gather(*asked, return_exceptions=True)
