"""Fixtures that several rooms share."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sluice.pipelines.text.tokenizer import Tokenizer
from tests.fork_server import fork_server
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.paths import CERTIFICATES, RILL_TOKENIZER, TESTS
from tests.quick import is_quick
from tests.seconds import Recorder, read_seconds
from tests.server_process import ServerProcess, StartServer, running_server
from tests.under_test import use_torch

# Before anything imports gRPC: its fork handlers kill one child in many of those that do not call exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - as in serving/__init__.py
# What servers keep is the tests' own: with a key of this machine's user they would all ask for one.
_DATA_HOME = TemporaryDirectory(prefix="sluice-tests-", ignore_cleanup_errors=True)
os.environ["XDG_DATA_HOME"] = _DATA_HOME.name  # noqa: TID251 - servers inherit it
# httpx reads all certificates of the world for each client, 20 ms long: of thousands of clients none asks the world.
os.environ["SSL_CERT_FILE"] = str(CERTIFICATES / "ca.pem")  # noqa: TID251 - servers inherit it
_LONG = {
    "cli/build/test_serving.py",
    "engine/delegated/tensorrt_llm/test_engine.py",
    "engine/delegated/tensorrt_llm/test_engine_faults.py",
    "engine/fleet/test_handover_live.py",
    "engine/forecast/test_retries.py",
    "engine/forecast/test_wait.py",
    "engine/runners/test_block_copies.py",
    "engine/runners/test_isolation.py",
    "engine/runners/test_types_and_batches.py",
    "gateway/watch/console/test_chat.py",
    "gateway/watch/console/test_infer.py",
    "gateway/watch/console/test_operator.py",
    "gateway/watch/console/test_pictures.py",
    "gateway/watch/console/test_rag.py",
    "gateway/answers/streams/test_two_gateways.py",
    "gateway/test_reloading.py",
    "gateway/test_remote_engines.py",
    "gateway/test_replicas.py",
    "gateway/test_tensorrtllm_backend.py",
    "gateway/workers/test_faults.py",
    "gateway/workers/test_serving.py",
    "load/test_soak.py",
    "pipelines/rag/documents/test_sandbox.py",
    "serving/backends/python/test_supervision.py",
    "triton/test_clients_control.py",
    "triton/test_faults.py",
    "tuning/test_live.py",
}
"""Files that show at length what shorter tests look at. They take half of the time of all, and are marked `long`, so
that `make test` leaves them to `make test-long`. `--durations=0` says which could be next."""
_LONG_PATHS = {TESTS / each for each in _LONG}
_GC_THRESHOLDS = (10_000, 20, 20)
"""Objects of tests are mostly gone by themselves; with Python's own thresholds quick tests take a twentieth longer."""
# Until the tests are collected: imports make objects that stay, and no garbage.
gc.disable()

# Other workers take the processor for longer than Hypothesis allows an example, or the making of examples. The suite
# tries the same ones each time, so that a change is red by what it changes; `make explore` tries new ones.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("several workers", _UNTIMED, derandomize=True)
settings.register_profile("explore", _UNTIMED, max_examples=1000, print_blob=True)
settings.load_profile("several workers")
# A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process of the suite.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-vllm", action="store_true", help="the gateway's tests of an LLM, over vLLM in place of a stand-in"
    )
    parser.addoption("--on-torch", action="store_true", help="tests of runners, engines and servers, over torch")
    parser.addoption("--record-seconds", action="store_true", help="write what files take into tests/seconds.toml")
    parser.addoption("--quick", action="store_true", help="only tests that start no process, server or model library")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("on_torch"):
        use_torch()
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path in _LONG_PATHS:
        item.add_marker("long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return half as many workers again as there are cores: tests that start processes wait much of their time."""
    num_cores = len(os.sched_getaffinity(0))
    return num_cores if config.getoption("--quick") else num_cores + num_cores // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.sharing import SharingScheduling  # make test-ray has no xdist

    return SharingScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest before the others, so that at the end no worker has a long file to itself."""
    if config.getoption("on_vllm"):
        items[:] = [item for item in items if _is_of_any_engine(item)]
    if config.getoption("on_torch"):
        items[:] = [item for item in items if item.get_closest_marker("openvino") is None and _is_on_torch(item)]
    if missing := [str(each) for each in _LONG_PATHS if not each.exists()]:
        raise pytest.UsageError(f"_LONG in tests/conftest.py names files that are not there: {missing}")
    seconds = read_seconds()
    if config.getoption("--quick"):
        quick = [item for item in items if item.path not in seconds and is_quick(item)]
        config.hook.pytest_deselected(items=[*{*items} - {*quick}])
        items[:] = quick
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))


def _is_of_any_engine(item: pytest.Item) -> bool:
    return "live" in getattr(item, "fixturenames", ()) and item.get_closest_marker("stand_in") is None


def _is_on_torch(item: pytest.Item) -> bool:
    """Whether it runs a model: of the tests of HTTP, those with a server that has one."""
    fixtures = {"live", "server", "start_server"} & {*getattr(item, "fixturenames", ())}
    is_of_http = not {TESTS / "gateway/front", TESTS / "gateway/api"}.isdisjoint(item.path.parents)
    return item.get_closest_marker("stand_in") is None and bool(fixtures or not is_of_http)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of tests and the libraries: a collection takes a tenth of the time.
    What is garbage by now stays, as looking for it takes most of a second of each worker."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()
    fork_server()  # in the environment that no test has changed


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Spare it, after each file, what that file has imported and shares: some tests collect garbage themselves."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def rill_path() -> Path:
    return RILL_TOKENIZER


@pytest.fixture(scope="session")
def rill() -> Tokenizer:
    return Tokenizer.load(RILL_TOKENIZER)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose streams can be as long as a test needs."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "1")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with running_server(checkpoint, tmp_path_factory.mktemp("server") / "log") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def start_server(checkpoint: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server that the test may do with as it likes."""
    with ExitStack() as stack:

        def start(*arguments: str, is_ready: bool = True) -> ServerProcess:
            running = stack.enter_context(running_server(checkpoint, tmp_path / "log", *arguments))
            if is_ready:
                running.wait_ready()
            return running

        yield start
