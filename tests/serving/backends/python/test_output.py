"""The output of models: lines of the log, with bounds, and with what a lost process printed last."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from sluice.errors import SluiceError
from sluice.serving.backends.python.output import MAX_LINE_BYTES, MAX_LINES
from tests.serving.backends.python.parts import ask, loaded, write_model
from tests.waiting import until

PRINTER = """
class TritonPythonModel:
    def initialize(self, args):
        print("loading weights")

    def execute(self, requests):
        for request in requests:
            exec(text_of(request))
        return [text("done") for _ in requests]

    def finalize(self):
        print("good bye")
"""
FLOOD = """
for number in range(500_000):
    print(f"{number:7}", "x" * 92)
"""
"""50 MB."""


def lines_of(caplog: pytest.LogCaptureFixture, name: str = "printer_0") -> list[str]:
    """Return what was logged of what an instance has printed."""
    messages = [each.getMessage() for each in caplog.records if each.name.endswith(".output")]
    return [message.removeprefix(f"[{name}] ") for message in messages if message.startswith(f"[{name}] ")]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_printed_lines_are_logged_with_the_instance_s_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with loaded(write_model(tmp_path / "printer", PRINTER)) as model:
        await ask(model, "print('one'); print('é\\n\\ntwo', file=sys.stderr); os.system('echo child')")
        await ask(model, "print('10 %\\r20 %', end='\\r'); os.write(1, b'\\xff\\n')")
        printed = ["loading weights", "one", "é", "two", "child", "10 %", "20 %", "\\xff"]
        await until(lambda: lines_of(caplog) == printed)
    assert lines_of(caplog) == [*printed, "good bye"]


async def test_a_long_line_is_continued_in_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with loaded(write_model(tmp_path / "printer", PRINTER)) as model:
        await ask(model, "print('a' * 10_000 + 'b')")
    logged = lines_of(caplog)[1:-1]
    assert [len(line) for line in logged] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 10_001 - 2 * MAX_LINE_BYTES]
    assert "".join(logged) == "a" * 10_000 + "b"


@pytest.mark.long
@pytest.mark.parametrize("place", ["initialize", "execute"])
async def test_a_model_that_prints_50_mb_holds_up_no_other_and_its_first_and_last_lines_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    other_source = write_model(tmp_path / "other", PRINTER)
    code = PRINTER.replace('print("loading weights")', FLOOD.strip().replace("\n", "\n        "))
    source = write_model(tmp_path / "printer", code if place == "initialize" else PRINTER)
    async with loaded(other_source) as other:

        async def flood() -> None:
            async with loaded(source) as model:
                if place == "execute":
                    await ask(model, FLOOD)

        flooding = asyncio.create_task(flood())
        await until(lambda: any("left out" in line for line in lines_of(caplog)))
        assert await ask(other, "") == "done"
        assert not flooding.done()
        await flooding
    logged = lines_of(caplog)
    numbers = [int(line[:7]) for line in logged if line.endswith("xxx")]
    first_or_last = MAX_LINES - 1  # another line is among them
    assert numbers[:first_or_last] == list(range(first_or_last))
    assert numbers[-first_or_last:] == list(range(500_000 - first_or_last, 500_000))
    left_out = [int(found[1]) for line in logged if (found := re.match(r"(\d+) lines left out", line))]
    assert len(numbers) + sum(left_out) == 500_000
    assert logged[-1] == "good bye"


@pytest.mark.parametrize(
    ("level", "death", "words"),
    [
        (logging.INFO, "os.kill(os.getpid(), 9)", []),
        (
            logging.WARNING,
            "import ctypes; ctypes.string_at(0)",
            ["Fatal Python error: Segmentation fault", "model.py"],
        ),
        (logging.WARNING, "os.write(2, b'half a line'); os._exit(3)", ["half a line"]),
    ],
)
async def test_what_a_lost_process_printed_last_is_logged_before_its_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int, death: str, words: list[str]
) -> None:
    caplog.set_level(level)
    async with loaded(write_model(tmp_path / "printer", PRINTER)) as model:
        with pytest.raises(SluiceError, match="is not healthy"):
            await ask(model, f"for number in range(1000): print('line', number)\n{death}")
        logged = lines_of(caplog)
        assert "line 999" in logged
        assert all(any(word in line for line in logged) for word in words), logged
        records = [each for each in caplog.records if each.name.startswith("sluice.serving.backends.python.")]
        assert [each.name.rpartition(".")[2] for each in records][-2:] == ["output", "supervisor"]
        assert level == logging.INFO or {each.levelname for each in records} == {"ERROR"}
        await ask(model, "")  # held until the next worker is up


async def test_the_trace_of_an_error_that_ends_a_process_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = PRINTER.replace('print("good bye")', 'raise OSError("cannot say good bye")')
    async with loaded(write_model(tmp_path / "printer", code)):
        pass
    logged = lines_of(caplog)
    assert "Traceback (most recent call last):" in logged
    assert logged[-1] == "OSError: cannot say good bye"
