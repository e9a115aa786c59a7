"""The flags and tables of other load generators, on a scripted server."""

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sluice.load.compatible.genai_perf import _parser as genai_parser
from sluice.load.compatible.genai_perf import _workload as genai_workload
from sluice.load.compatible.vllm_bench import _config as vllm_config
from sluice.load.compatible.vllm_bench import _parser as vllm_parser
from sluice.load.config import ApiKind, Arrival, LoadConfig, Slo, TokenRange, TurnRange, Workload
from tests.load.scripted_server import Wire, command_against, good_stream
from tests.load.test_sessions import chat_answer


def vllm(line: str) -> LoadConfig:
    return vllm_config(vllm_parser().parse_args(shlex.split(line)))


def test_vllm_bench_prints_its_table_and_writes_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "vllm-bench serve --port PORT --model m --random-input-len 8 --random-output-len 3 --num-prompts 6 "
        "--ignore-eos --max-concurrency 2 --percentile-metrics ttft,e2el --metric-percentiles 50,99.9 "
        f"--goodput ttft:60000 --metadata run=7 --save-result --save-detailed --result-dir {tmp_path} "
        "--result-filename out.json"
    )
    status, server = command_against(good_stream, *shlex.split(line))
    assert status == 0
    assert len(server.wires) == 6
    assert all(len(wire.body["prompt"]) == 8 for wire in server.wires)
    printed = capsys.readouterr().out.splitlines()
    rows = {name.strip(): value.strip() for name, _, value in (row.partition(":") for row in printed)}
    assert printed[0] == "============ Serving Benchmark Result ============"
    assert (rows["Successful requests"], rows["Total generated tokens"]) == ("6", "18")
    assert {"Mean TTFT (ms)", "Median TTFT (ms)", "P50 TTFT (ms)", "P99.9 E2EL (ms)"} <= rows.keys()
    assert "Mean ITL (ms)" not in rows
    assert rows["Median TTFT (ms)"] == rows["P50 TTFT (ms)"]
    document: dict[str, Any] = json.loads((tmp_path / "out.json").read_bytes())
    assert (document["completed"], document["total_output_tokens"], document["run"]) == (6, 18, "7")
    assert 1 <= document["max_concurrent_requests"] <= 2
    assert document["request_goodput"] == pytest.approx(document["request_throughput"])
    assert [len(gaps) for gaps in document["itls"]] == [2] * 6


def test_vllm_s_flags_have_their_meaning_here() -> None:
    config = vllm(
        "--backend openai-chat --base-url http://h:1/ --request-rate 4 --burstiness 0.5 --max-concurrency 9 "
        "--random-input-len 100 --random-output-len 10 --random-range-ratio 0.5 --random-prefix-len 20 --top-p 0.9 "
        "--header a=b --goodput ttft:100 e2el:900 --seed 3 --num-warmups 2"
    )
    assert (config.target.api, config.target.url, config.target.headers) == (ApiKind.CHAT, "http://h:1", (("a", "b"),))
    pace, work = config.pace, config.workload
    assert (pace.request_rate, pace.arrival, pace.burstiness, pace.concurrency) == (4.0, Arrival.GAMMA, 0.5, 9)
    assert (pace.num_requests, pace.warmup) == (1000, 2)
    assert (work.prompt_tokens, work.output_tokens) == (TokenRange(70, 170), TokenRange(5, 15))
    assert (work.prefix_tokens, work.extra_body, work.ignore_eos) == (20, {"top_p": 0.9}, False)
    assert config.slo == Slo(ttft_ms=100.0, e2e_ms=900.0)
    all_at_once = vllm("--num-prompts 7").pace
    assert (all_at_once.concurrency, all_at_once.request_rate) == (7, None)


def test_vllm_s_datasets_are_traces(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text("Timestamp,Model,Request tokens,Response tokens\n1,m,5,2\n2,m,6,3\n")
    config = vllm(f"--dataset-name burstgpt --dataset-path {file} --num-prompts 50")
    assert (config.workload.trace, config.pace.num_requests) == (file, 2)


def test_genai_perf_prints_its_table_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "genai-perf profile -m m --endpoint-type chat --streaming -u URL --isl 4 --osl 3 --output-tokens-stddev 0 "
        "--session-concurrency 2 --num-sessions 3 --session-turns-mean 2 --extra-inputs top_k:5 "
        f"--goodput request_latency:60000 --artifact-dir {tmp_path} --profile-export-file mine.json"
    )
    status, server = command_against(chat_answer("ok"), *shlex.split(line))
    assert status == 0
    assert len(server.wires) == 6
    assert all(wire.body["top_k"] == 5 for wire in server.wires)
    printed = capsys.readouterr().out
    for title in ("Time To First Token (ms)", "Inter Token Latency (ms)", "Request Throughput (requests/sec)"):
        assert title in printed
    document: dict[str, Any] = json.loads((tmp_path / "mine_genai_perf.json").read_bytes())
    assert document["output_sequence_length"]["avg"] == 3.0
    assert document["request_count"] == {"unit": "count", "avg": 6.0}
    assert document["time_to_first_token"]["min"] <= document["time_to_first_token"]["p99"]
    rows = list(csv.DictReader((tmp_path / "mine_genai_perf.csv").read_text().splitlines()))
    assert rows[0]["Metric"] == "Time To First Token (ms)"


def test_genai_perf_without_streaming_shows_whole_requests(capsys: pytest.CaptureFixture[str]) -> None:
    line = "genai-perf profile -m m --endpoint-type completions -u URL --isl 4 --osl 3 --request-count 2"
    assert command_against(good_stream, *shlex.split(line))[0] == 0
    printed = capsys.readouterr()
    assert "streamed all the same" in printed.err
    assert "Request Latency" in printed.out and "First Token" not in printed.out


def test_genai_perf_s_deviations_are_those_of_uniform_lengths() -> None:
    given = "-m m --isl 100 --synthetic-input-tokens-stddev 10 --session-turns-mean 3 --session-turns-stddev 1"
    workload: Workload = genai_workload(genai_parser().parse_args(given.split()))
    assert workload.prompt_tokens == TokenRange(83, 117)
    assert workload.turns == TurnRange(1, 5)


async def refuses(wire: Wire) -> None:
    await wire.whole("500 Oops", b"no")


@pytest.mark.parametrize(
    "line",
    ["vllm-bench --port PORT --num-prompts 1", "genai-perf -m m --endpoint-type chat -u URL --request-count 1"],
)
def test_failures_have_their_exit_status(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, server = command_against(refuses, *shlex.split(line))
    assert (status, len(server.wires)) == (1, 1)
    assert "http_500: 1, first: no" in capsys.readouterr().out
