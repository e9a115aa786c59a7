"""A worker with OpenVINO GenAI's continuous batching, at its default limits and in bf16 as the others."""

import time
from typing import Any

from benchmarks.offline.protocol import Request, WorkerOptions, serve


class GenaiEngine:
    """Runs the batch by `generate`, whose loop is C++, and one stream by `step`."""

    def __init__(self, options: WorkerOptions) -> None:
        import openvino_genai

        self._genai: Any = openvino_genai
        self.version = f"OpenVINO GenAI {openvino_genai.__version__}"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options.kv_cache_gib
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            options.model,
            openvino_genai.Tokenizer(options.model),
            scheduler,
            "CPU",
            INFERENCE_PRECISION_HINT="bf16",
            KV_CACHE_PRECISION="bf16",  # its default, u8, is another precision than the others compute in
            INFERENCE_NUM_THREADS=options.num_threads,
        )

    def batch(self, requests: list[Request]) -> int:
        prompts = [_tensor(token_ids) for token_ids, _ in requests]
        results = self._pipeline.generate(prompts, [self._sampling(num_tokens) for _, num_tokens in requests])
        return sum(len(result.m_generation_ids[0]) for result in results)

    def single(self, request: Request) -> list[float]:
        token_ids, num_tokens = request
        handle = self._pipeline.add_request(0, _tensor(token_ids), self._sampling(num_tokens))
        times: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                now = time.perf_counter()
                times += [now for output in handle.read().values() for _ in output.generated_ids]
        return times

    def _sampling(self, num_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = num_tokens
        return config


def _tensor(token_ids: list[int]) -> Any:
    import numpy as np
    import openvino as ov

    return ov.Tensor(np.array([token_ids], np.int64))


if __name__ == "__main__":
    serve(GenaiEngine)
