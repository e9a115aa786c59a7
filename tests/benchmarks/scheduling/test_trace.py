import pytest

from benchmarks.figures import BenchmarkError
from benchmarks.scheduling.trace import TimedRequest, replay
from sluice.engine.config import EngineConfig
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.engine.fake_runner import EchoRunner


def _timed(number: int, at_s: float, max_tokens: int = 8) -> TimedRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return TimedRequest(at_s, GenerateRequest(request_id="r", prompt_token_ids=[number, 2, 3], sampling=params))


def test_every_request_of_a_trace_is_measured_from_its_time_on() -> None:
    config = EngineConfig(model_path="", max_num_seqs=2)
    run = replay(EchoRunner(), config, [_timed(1, 0.0), _timed(2, 0.0), _timed(3, 0.0), _timed(4, 0.03)])
    assert [len(outcome.token_ids) for outcome in run.outcomes] == [8] * 4
    assert run.outcomes[3].event_times[0] >= 0.03
    assert all(outcome.ttft_s > 0 and len(outcome.gaps_s) == 7 for outcome in run.outcomes)
    assert len(run.waits) == 4 and all(wait.actual_s > 0 for wait in run.waits)
    assert run.outcomes[2].event_times[0] >= min(outcome.event_times[-1] for outcome in run.outcomes[:2])
    assert run.stats.generation_tokens_total == 32


def test_a_refused_request_spoils_the_run() -> None:
    with pytest.raises(BenchmarkError, match="max_tokens"):
        replay(EchoRunner(), EngineConfig(model_path=""), [_timed(1, 0.0, max_tokens=0)])
