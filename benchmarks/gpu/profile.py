"""Profiles a decode step: writes a trace for Chrome's or Perfetto's viewer, and lists its kernels by time."""

import numpy as np
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.models import random_runner
from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import large
from benchmarks.step_batches import step_batch

NUM_SHOWN = 12


def measure(setting: Setting, notes: Notes) -> None:
    count, context = (3, 40) if setting.is_tiny else (32, 1024)
    is_gpu = setting.device == "cuda"
    num_blocks = count * -(-(context + 1) // 32)
    limits = {"max_num_seqs": count, "max_num_batched_tokens": 512, "num_blocks": num_blocks}
    with random_runner(setting, large(setting), limits) as runner:
        batch, rows = step_batch([context - 1] * count, [1] * count, 32, num_blocks), np.arange(count)
        for _ in range(3):
            runner.run(batch).argmax(rows)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]) as profiler:
            runner.run(batch).argmax(rows)
    profiler.export_chrome_trace(str(setting.out / "decode-trace.json.gz"))
    attribute = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -float(getattr(event, attribute)))
    total = sum(float(getattr(event, attribute)) for event in events)
    notes.note("step", busy_ms=total / 1e3)
    for event in events[:NUM_SHOWN]:
        time_us = float(getattr(event, attribute))
        notes.note(event.key[:80], us=time_us, calls=int(event.count), share=time_us / total)
