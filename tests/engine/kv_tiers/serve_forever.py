"""A process that serves prompts until it is killed: `python -m tests.engine.kv_tiers.serve_forever FOLDER`."""

import sys
from itertools import count

from sluice.engine.kv_tiers import disk
from tests.engine.scripted_executor import ScriptedExecutor

PROMPTS = [[400 + 50 * each + position for position in range(50)] for each in range(40)]
LIMITS = {"kv_host_cache_bytes": 64 * 32, "kv_disk_cache_bytes": 300 * 32}
"""Memory for a few of the prompts, and a disk for not quite all: its slots are written again and again."""


def main(folder: str) -> None:
    disk.SAVE_S, disk.MAX_SAVING = 0.02, 1.0
    bench = ScriptedExecutor(kv_disk_cache=folder, **LIMITS)  # type: ignore[arg-type]
    for stream_id in count():
        bench.submit(stream_id, PROMPTS[stream_id * 7 % len(PROMPTS)], max_tokens=2)
        while not bench.reasons[stream_id]:
            bench.step()
        sys.stdout.write(f"{stream_id}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
