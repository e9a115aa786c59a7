"""`kill -9` of an engine with a disk tier: the next one finds blocks or discards them, and serves no wrong token."""

import subprocess
import sys
from pathlib import Path

from tests.engine.fake_runner import echo
from tests.engine.kv_tiers.serve_forever import LIMITS, PROMPTS
from tests.engine.kv_tiers.test_executor import play, tier_stats
from tests.engine.scripted_executor import ScriptedExecutor
from tests.paths import ROOT


def test_after_a_kill_blocks_are_found_or_discarded_and_no_token_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.kv_tiers.serve_forever", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 120 and any(tmp_path.glob("*.index")):
                break
        process.kill()
    assert process.returncode < 0, "it was killed, and did not end by itself"
    bench = ScriptedExecutor(kv_disk_cache=str(tmp_path), **LIMITS)  # type: ignore[arg-type]
    assert tier_stats(bench).disk_blocks > 0
    for stream_id, prompt in enumerate(PROMPTS):
        play(bench, stream_id, prompt)
        assert bench.tokens[stream_id] == echo(prompt, 2)
    stats = tier_stats(bench)
    assert stats.disk_hits_total + stats.disk_damaged_total > 0
    bench.executor._returns.close()  # type: ignore[union-attr]
