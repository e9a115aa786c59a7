"""vLLM by itself, without Sluice: reads jobs from the standard input and writes what it generates. Run with vLLM's
Python; a job is a JSON object with `arguments` of `LLM`, `prompts` (lists of token ids), `max_tokens`, and
`one_by_one`."""

import json
import sys
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(disable_log_stats=False, **job["arguments"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    batches = [[each] for each in prompts] if job["one_by_one"] else [prompts]
    outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
    preemptions = sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
    answer = {"token_ids": [list(each.outputs[0].token_ids) for each in outputs], "preemptions": preemptions}
    llm.llm_engine.engine_core.shutdown()
    return answer


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    sys.stdout.write(json.dumps([run(job) for job in jobs]))
