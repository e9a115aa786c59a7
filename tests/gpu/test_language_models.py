"""The bundled model on the delegated runtimes: its tokens, and a cache that is too small for all requests at once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from sluice.cli.gpus import GpuFacts, read_driver
from sluice.engine.config import Runtime
from sluice.engine.runtimes import RUNTIMES
from tests.server_process import ServerProcess, running_command
from tests.vllm.conftest import LONG, NUM_BLOCKS, PROMPTS, RILL, complete, metric

MAX_TOKENS = 32
CUDA_BYTES = 100 << 20
"""Memory that a process which uses a GPU holds at least, for CUDA itself."""


@dataclass(frozen=True)
class Setup:
    """How a runtime is started, and how far apart logits must be for its precision to choose the same token."""

    arguments: tuple[str, ...]
    clear_margin: float


SETUPS = {
    "vllm": Setup(("--dtype=f32", "--runtime-setting=enforce_eager=true", "--runtime-setting=block_size=32"), 0.01),
    "tensorrt_llm": Setup(("--dtype=bf16",), 0.5),
}


@dataclass
class RunningModel:
    server: ServerProcess
    runtime: str
    gpu_bytes: int
    """GPU memory that was taken while the server started."""


@pytest.fixture(scope="module", params=SETUPS)
def model(
    request: pytest.FixtureRequest, gpus: tuple[GpuFacts, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningModel]:
    """The bundled model with a cache of NUM_BLOCKS blocks."""
    runtime = request.param
    if not RUNTIMES[Runtime(runtime)].is_installed():
        pytest.skip(f"{RUNTIMES[Runtime(runtime)].title} is not installed: sluice runtime install {runtime}")
    before = free_bytes()
    arguments = (f"--runtime={runtime}", "--max-model-len=256", f"--num-blocks={NUM_BLOCKS}")
    log = tmp_path_factory.mktemp("log") / runtime
    with running_command(log, str(RILL), *arguments, *SETUPS[runtime].arguments) as server:
        server.wait_ready()
        yield RunningModel(server, runtime, before - free_bytes())


def free_bytes() -> int:
    return sum(gpu.memory_free_bytes for gpu in read_driver().gpus)


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def clear_tokens(prompt: list[int], margin: float) -> list[int]:
    """Return transformers' greedy tokens in float32, up to the first whose logit leads by less than `margin`."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(RILL, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + MAX_TOKENS:
            best = reference(torch.tensor([tokens])).logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < margin:
                break
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.gpu("{model}: the engine runs on a GPU")
def test_the_engine_is_on_a_gpu(model: RunningModel) -> None:
    assert model.gpu_bytes > CUDA_BYTES, f"{model.gpu_bytes >> 20} MiB were taken while the server started"


@pytest.mark.gpu("{model}: greedy tokens equal those of transformers wherever the choice is clear")
def test_tokens_are_those_of_transformers(model: RunningModel) -> None:
    expected = [clear_tokens(prompt, SETUPS[model.runtime].clear_margin) for prompt in PROMPTS[::4]]
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda prompt: complete(model.server, prompt, max_tokens=MAX_TOKENS), PROMPTS[::4])]
    assert sum(map(len, expected)) > 0
    assert [ids(answer)[: len(tokens)] for answer, tokens in zip(answers, expected, strict=True)] == expected


@pytest.mark.gpu("{model}: 32 requests on a cache for three end, and none is preempted")
def test_nothing_is_preempted_on_a_small_cache(model: RunningModel) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(lambda prompt: ids(complete(model.server, prompt, max_tokens=LONG)), PROMPTS)]
    assert [len(answer) for answer in answers] == [LONG] * len(PROMPTS)
    assert metric(model.server, "sluice_engine_preemptions_total") == 0
