"""What a run learns beside its requests: the server's metrics, and energy."""

import asyncio
from pathlib import Path

import pytest

from sluice.load.run import Run, run_load
from sluice.load.watch.energy import EnergyWatch, MeterError, RaplMeter
from sluice.load.watch.metrics_page import dialect_of, read_page
from sluice.load.watch.watcher import AUTO
from tests.load.scripted_server import Wire, good_stream, load_config, run_against, serving
from tests.server_process import MODEL, ServerProcess

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running{engine="0",model_name="other"} 9.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 2.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 2.0
process_cpu_seconds_total 9.0
"""


def test_a_page_is_read_for_the_runs_model() -> None:
    dialect = dialect_of(VLLM)
    assert dialect is not None and dialect.software == "vLLM"
    page = read_page(VLLM, dialect, "m")
    assert (page.running, page.waiting, page.phases["queue"].mean) == (5.0, 4.0, 0.75)
    assert page.phases["prefill"].mean is None
    # A model that no line names is one behind another name, such as a pipeline's.
    assert read_page(VLLM, dialect, "pipeline").running == 14.0


def test_other_pages_are_not_guessed_at() -> None:
    assert dialect_of("process_cpu_seconds_total 9.0\n") is None


def test_a_servers_own_times_are_in_the_report(server: ServerProcess) -> None:
    config = load_config(server.base_url, model=MODEL, num_requests=4, warmup=2, metrics_url=AUTO)
    run = asyncio.run(run_load(config))
    found = run.watched.server
    assert found is not None, run.watched.missing
    assert (found.software, found.num_requests) == ("Sluice", 4)
    assert found.phases_ms.keys() == {"queue", "prefill", "decode"}
    assert run.summary.e2e_ms.mean is not None
    assert 0 < sum(found.phases_ms.values()) <= run.summary.e2e_ms.mean
    assert found.batch is not None and found.batch >= 1.0
    assert found.samples


def run_beside(page: str, metrics_url: str = AUTO) -> Run:
    async def metrics(wire: Wire) -> None:
        if b" /metrics " in wire.head:
            await wire.whole("200 OK", page.encode())
        else:
            await wire.whole("404 Not Found", b"{}")

    async def scenario() -> Run:
        async with serving(good_stream, metrics) as server:
            url = metrics_url.replace("SERVER", server.url)
            return await run_load(load_config(server.url, metrics_url=url))

    return asyncio.run(scenario())


@pytest.mark.parametrize("url", [AUTO, "SERVER/metrics", "SERVER"])
def test_other_servers_have_their_page_beside_the_api(url: str) -> None:
    found = run_beside(VLLM, url).watched.server
    assert found is not None and found.software == "vLLM"
    assert {(each.running, each.waiting) for each in found.samples} == {(5.0, 4.0)}
    assert found.phases_ms == {}, "nothing was counted during the run"


def test_a_run_goes_on_without_metrics_and_says_why() -> None:
    run = run_beside("nothing_known 1\n")
    assert run.summary.num_served == 1
    assert run.watched.server is None
    assert "none of the figures that are known" in run.watched.missing
    assert "answers 404" in run_against(good_stream, metrics_url=AUTO).watched.missing


def write_package(folder: Path, name: str, energy_uj: int) -> Path:
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "energy_uj").write_text(f"{energy_uj}\n")
    (package / "max_energy_range_uj").write_text("10000000\n")
    return package


def test_rapl_counts_its_packages_across_the_end_of_a_counter(tmp_path: Path) -> None:
    first = write_package(tmp_path, "intel-rapl:0", 9_000_000)
    write_package(tmp_path, "intel-rapl:1", 1_000_000)
    write_package(tmp_path, "intel-rapl:0:0", 5_000_000)  # a part of the first package
    meter = RaplMeter(tmp_path)
    start_j = meter.read_j()
    (first / "energy_uj").write_text("500000\n")
    assert meter.read_j() - start_j == pytest.approx(1.5)
    assert meter.name == "RAPL, 2 packages"


def test_meters_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(MeterError, match="RAPL: nothing in"):
        RaplMeter(tmp_path)
    energy = EnergyWatch().finish()
    assert all(joules >= 0 for joules in energy.joules.values())
    assert energy.joules or ("NVML" in energy.missing and "RAPL" in energy.missing)
