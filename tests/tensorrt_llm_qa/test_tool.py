"""The tool tells what passes and what does not, over a checkout in small that has one thing wrong at a time."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt_llm_qa.__main__ import PARTS, main, run_part
from tests.tensorrt_llm_qa.configuration import FIELDS_FILE
from tests.tensorrt_llm_qa.miniature import VERSION, append, write_checkout

pytestmark = pytest.mark.slow
SHARE = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    write_checkout(folder)
    return folder


@pytest.fixture
def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to break."""
    monkeypatch.setenv("STAND_IN_VERSION", VERSION)
    shutil.rmtree(folder / "broken", ignore_errors=True)
    return Path(shutil.copytree(folder / "checkout", folder / "broken"))


def run(part: str, checkout: Path, work: Path, fields: Path | None = None) -> Any:
    return run_part(part, argparse.Namespace(checkout=checkout, work=work, share=SHARE, fields=fields))


QUICK = ["modules", "texts"]
OTHERS = [part for part in PARTS if part not in (*QUICK, "field-names")]


@pytest.mark.parametrize("parts", [QUICK, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["quick", "others"])
def test_parts_pass_and_the_table_says_so(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: list[str]
) -> None:
    assert main([str(checkout), *parts, "--work", str(tmp_path), "--share", str(SHARE)]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == f"TensorRT-LLM {VERSION}"
    assert [row.split()[:2] for row in rows[: len(parts)]] == [[part, "pass"] for part in parts]


@pytest.mark.long
def test_names_that_are_new_and_names_that_are_lost(checkout: Path, tmp_path: Path) -> None:
    lost = {each.removeprefix("lost: ") for each in run("field-names", checkout, tmp_path).failures}
    told = json.loads(FIELDS_FILE.read_text())
    for path, lists in told.items():
        for place, lines in lists.items():
            names = " ".join(lines).split()
            lists[place] = [" ".join(n for n in names if (f"{path}.{n}" if path else n) not in lost)]
    fields = tmp_path / "fields.json"
    fields.write_text(json.dumps(told))
    report = run("field-names", checkout, tmp_path, fields)
    assert report.num_passed > 100 and not report.failures
    append(checkout, "llmapi/llm_args.py", """
del KvCacheConfig.model_fields["onboard_blocks"]
KvCacheConfig.model_fields["of_tomorrow"] = KvCacheConfig.model_fields["dtype"]
""")  # fmt: skip
    changed = run("field-names", checkout, tmp_path, fields)
    assert changed.failures == ["lost: kv_cache_config.onboard_blocks", "new: kv_cache_config.of_tomorrow"]


SAMPLING = "def gone(self):\n    if self.min_p: raise ValueError('min_p is gone')\nSamplingParams._validate = gone"
CONFIGURATION = "def refuse(self, **_): raise ValueError('no room')\nKvCacheConfig.__init__ = refuse"
SCHEDULER = "_fit = PyCapacityScheduler.schedule_request\nPyCapacityScheduler.schedule_request = "
SCHEDULER += "lambda *given: (_fit(*given)[0][:1], [], [])"
TEXT = "def _check_arguments(): raise RequestError('the moon is full')"
BROKEN = [
    ("modules", "executor/utils.py", "import of_tomorrow", "No module named 'of_tomorrow' (executor/utils.py:"),
    ("modules", "llmapi/utils.py", "from ..gone import x", "No module named 'tensorrt_llm.gone' (llmapi/utils.py:"),
    ("configuration", "llmapi/llm_args.py", CONFIGURATION, "TensorRT-LLM 1.3.0 refuses kv_cache_config: no room"),
    ("sampling-parameters", "sampling_params.py", SAMPLING, "refuses the sampling parameters: min_p is gone"),
    ("runtime", "executor/result.py", "_REASONS[FinishReason.STOP_WORDS] = 'cancelled'", "FinishReason.CANCELLED"),
    ("runtime", "executor/proxy.py", "", "has no mpi_futures any more"),
    ("schedulers", "_torch/pyexecutor/scheduler/scheduler.py", SCHEDULER, "the stand-in schedules"),
    ("texts", "llmapi/llm.py", TEXT, "becomes an internal error: the moon is full"),
    ("template", "../triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt", "of_tomorrow: 1", "of_tomorrow"),
]


@pytest.mark.long
@pytest.mark.parametrize(("part", "file", "text", "expected"), BROKEN)
def test_what_is_wrong_is_named(checkout: Path, tmp_path: Path, part: str, file: str, text: str, expected: str) -> None:
    if text:
        append(checkout, file, f"\n{text}\n")
    else:
        (checkout / "tensorrt_llm" / file).write_text("")
    failures = run(part, checkout, tmp_path).failures
    assert failures and any(expected in each for each in failures), failures
