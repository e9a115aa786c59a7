"""`sluice simulate`: what it prints and writes, and its errors."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sluice.cli.simulate import command
from sluice.engine.simulation.fleet import FleetConfig, simulate
from sluice.engine.simulation.profile import ReplicaProfile, StepCosts, bundled_profile, read_profile
from sluice.engine.simulation.traces import SharedPrefixes, read_trace, shared_prefix_trace
from sluice.errors import SluiceError

SHAPE = SharedPrefixes(num_requests=60, rate=40.0, num_prefixes=4, prefix_tokens=256, own_tokens=(20, 40))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"at_s": r.at_s, "prompt_tokens": r.num_prompt, "output_tokens": r.num_output, "prefix": r.parts}
        for r in shared_prefix_trace(SHAPE)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = command([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_it_prints_the_figures_and_writes_them(run: Run, trace: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"out.{kind}" for kind in ("json", "csv", "html")]
    flags = [text for file in files for text in (f"--{file.suffix[1:]}", file)]
    code, shown, errors = run(trace, "--replicas", 2, "--ttft-target", 1000, "--itl-target", 1000, *flags)
    assert (code, errors) == (0, "")
    assert "2 replicas, router prefix, policy guaranteed_no_evict" in shown
    assert re.search(r"^TTFT +[\d.,]+ +[\d.,]+", shown, re.MULTILINE)
    assert "goodput" in shown
    assert "100.00% of all" in shown
    report = json.loads(files[0].read_bytes())
    assert report["summary"]["num_requests"] == 60
    assert report["summary"]["share_in_target"] == 1.0
    assert sum(each["num_requests"] for each in report["replicas"]) == 60
    assert report["summary"]["hit_rate"] <= report["summary"]["infinite_hit_rate"]
    rows = list(csv.DictReader(files[1].read_text().splitlines()))
    assert len(rows) == 60
    assert sum(int(row["cached_tokens"]) for row in rows) == report["summary"]["cached_tokens"]
    assert all(float(row["wait_s"]) <= float(row["ttft_s"]) <= float(row["e2e_s"]) for row in rows)
    page = files[2].read_text()
    assert page.count("<svg") == page.count("</svg>") == 6
    assert not re.search(r"(src|href)=|https?://|nan", page)


def test_the_least_number_of_replicas_is_found(run: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = (trace, "--speed", 500, "--ttft-target", 50, "--share", 90)
    code, _, progress = run(*flags, "--find-replicas", 64, "--json", out)
    assert code == 0
    found = json.loads(out.read_bytes())["summary"]
    assert found["share_in_target"] >= 0.9
    assert f"{found['num_replicas']} replicas: " in progress
    assert found["num_replicas"] > 1
    run(*flags, "--replicas", found["num_replicas"] - 1, "--json", out)
    assert json.loads(out.read_bytes())["summary"]["share_in_target"] < 0.9
    code, _, errors = run(*flags, "--find-replicas", found["num_replicas"] - 1, "--quiet")
    assert code == 1
    assert "allow more replicas, or more time" in errors


def test_requests_that_never_fit_are_counted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n0,2000,10\n1,100,10\n")
    out = tmp_path / "out"
    code, shown, _ = run(path, "--csv", out, "--html", tmp_path / "page.html")
    assert code == 0
    assert "1 served" in shown
    assert "1 can never fit" in shown
    assert out.read_text().splitlines()[1] == "0,0.000000,-1,2000"


def test_a_trace_of_which_nothing_fits_has_a_report_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n0,2000,10\n")
    code, shown, _ = run(path, "--html", tmp_path / "page.html", "--json", tmp_path / "out.json")
    assert code == 0
    assert "0 served" in shown
    assert "No request was served." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "argument --replicas: must be a whole number of at least 1, got '0'"),
        (["--speed", "0"], "argument --speed: must be a number above 0, got '0'"),
        (["--share", "101"], "must be a number above 0, at most 100, got '101'"),
        (["--router", "fast"], "argument --router: invalid choice: 'fast'"),
        (["--json", "/no/such/folder/file"], "must be a file in a folder that exists"),
        (["--find-replicas", "9"], "--find-replicas needs --ttft-target or --itl-target"),
        (["--find-replicas", "9", "--replicas", "3", "--ttft-target", "1"], "contradict each other"),
        (["--max-num-seqs", "4096"], "max_num_batched_tokens is 2048; expected at least max_num_seqs, 4096"),
        (["--costs", "/no/such/file"], "/no/such/file cannot be read: No such file or directory"),
        (["--format", "mooncake"], "input_length is missing"),
    ],
)
def test_a_bad_option_is_one_line_and_code_2(run: Run, trace: Path, flags: list[str], message: str) -> None:
    code, shown, errors = run(trace, *flags)
    assert (code, shown) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_the_bundled_profile_is_read() -> None:
    assert bundled_profile().name == "rill"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"costs": {"step_s": -1.0, "prefill_token_s": 1.0}}, "step_s is -1.0; expected seconds, at least 0"),
        ({"costs": {"step_s": 1.0}}, "missing required field `prefill_token_s`"),
        ({"costs": {"step_s": 0.0, "prefill_token_s": 1.0}}, "such steps would take no time"),
        ({"costs": {"step_s": 1.0, "prefill_token_s": 1.0}, "blocks": 3}, "unknown field `blocks`"),
        ({"costs": {"step_s": 1.0, "prefill_token_s": 1.0}, "num_blocks": 0}, "num_blocks is 0; expected at least 1"),
    ],
)
def test_a_wrong_profile_names_its_field(tmp_path: Path, document: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SluiceError, match=message):
        read_profile(path)


def test_costs_are_what_the_profile_says(run: Run, tmp_path: Path) -> None:
    profile = ReplicaProfile(costs=StepCosts(step_s=1.0, prefill_token_s=0.0, decode_seq_s=0.5))
    costs, path, out = tmp_path / "costs.json", tmp_path / "trace.csv", tmp_path / "out.json"

    costs.write_bytes(msgspec.json.encode(profile))
    path.write_text("Timestamp,Request tokens,Response tokens\n0,100,3\n")
    assert run(path, "--costs", costs, "--json", out)[0] == 0
    summary = json.loads(out.read_bytes())["summary"]
    assert summary["ttft_s"]["p50"] == pytest.approx(1.0)
    assert summary["e2e_s"]["p50"] == pytest.approx(1.0 + 2 * 1.5)


def load_row(at_s: float, num_prompt: int, num_output: int) -> dict[str, float]:
    """Return a request as `sluice load --json` writes it."""
    output = {"output_tokens": num_output, "output_tokens_asked": num_output}
    return {"intended_s": at_s, "prompt_tokens": num_prompt, **output}


def test_costs_are_scaled_to_a_measured_run(run: Run, trace: Path, tmp_path: Path) -> None:
    """The run is one that costs three times as much would give."""
    slow = bundled_profile()
    costs = {name: 3 * getattr(slow.costs, name) for name in slow.costs.__struct_fields__}
    slow = msgspec.structs.replace(slow, costs=StepCosts(**costs), request_s=3 * slow.request_s)
    report = {"requests": [load_row(r.at_s, r.num_prompt, r.num_output) for r in read_trace(trace)]}
    measured = tmp_path / "run.json"
    measured.write_text(json.dumps(report))
    tpot_s = simulate(read_trace(measured, "load"), FleetConfig(slow, 2)).tpot_s.mean()
    measured.write_text(json.dumps(report | {"summary": {"tpot_ms": {"mean": 1e3 * tpot_s}}}))
    code, shown, errors = run(trace, "--measured", measured, "--measured-replicas", 2)
    assert code == 0
    assert [float(factor) for factor in re.findall(r"costs times ([\d.]+)", errors)] == [pytest.approx(3.0, rel=0.01)]
    assert shown != run(trace)[1]


def test_what_replicas_on_the_same_cores_cost_each_other_is_told_by_a_measured_run(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    """The run is one of two replicas whose steps take half as long again while the other is in one."""
    slow = msgspec.structs.replace(bundled_profile(), slowdown=0.5)
    rows = [load_row(0.01 * number, 100, 40) for number in range(50)]
    measured = tmp_path / "run.json"
    measured.write_text(json.dumps({"requests": rows}))
    tpot_s = simulate(read_trace(measured, "load"), FleetConfig(slow, 2)).tpot_s.mean()
    measured.write_text(json.dumps({"requests": rows, "summary": {"tpot_ms": {"mean": 1e3 * tpot_s}}}))
    code, shown, errors = run(trace, "--replicas", 2, "--measured-together", measured)
    assert (code, re.findall(r"another (\d+) % longer", errors)) == (0, ["50"])
    assert shown != run(trace, "--replicas", 2)[1]
    measured.write_text(json.dumps({"requests": rows, "summary": {"tpot_ms": {"mean": 9e9}}}))
    code, _, errors = run(trace, "--measured-together", measured)
    assert (code, "is out of reach" in errors) == (2, True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "it has no mean TPOT"),
        ('{"summary": {"tpot_ms": {"mean": null}}}', "it has no mean TPOT"),
        ('{"summary": {"tpot_ms": {"mean": 9e9}}, "requests": [ROW]}', "is out of reach"),
        ('{"summary": {"tpot_ms": {"mean": 9.0}}, "config": {"workload": {"prefix_tokens": 64}}}', "share nothing"),
    ],
)
def test_a_measured_run_that_says_nothing_is_refused(
    run: Run, trace: Path, tmp_path: Path, text: str, problem: str
) -> None:
    row = load_row(0.0, 10, 10)
    measured = tmp_path / "run.json"
    measured.write_text(text.replace("ROW", json.dumps(row)))
    code, _, errors = run(trace, "--measured", measured)
    assert code == 2
    assert problem in errors
