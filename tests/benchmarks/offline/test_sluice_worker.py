from pathlib import Path

import pytest

from benchmarks.models import S, model_s
from benchmarks.offline import comparison, engines
from benchmarks.offline.engines import MODELS
from benchmarks.offline.worker import running_worker
from tests.paths import RILL_TOKENIZER


@pytest.mark.long
@pytest.mark.slow
def test_sluice_does_the_jobs_through_its_engine_process(tmp_path: Path) -> None:
    checkpoint = model_s(tmp_path, RILL_TOKENIZER)
    launch = engines.ENGINES[engines.OURS](checkpoint, MODELS[0], tmp_path, print)
    with running_worker(launch, tmp_path / "log") as worker:
        assert worker.batch(comparison.batch_requests(S["vocab_size"], seed=1, output_share=0.05)) > 0
        assert len(worker.single(([1, 2, 3], 4))) == 4
