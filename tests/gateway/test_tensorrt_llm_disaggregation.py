"""Context and generation servers of TensorRT-LLM that join one gateway from elsewhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from sluice.pipelines.text.tokenizer import Tokenizer
from tests.engine.fake_runner import echo_next
from tests.gateway.serving_here import HereServer, serving_here
from tests.paths import ROOT
from tests.stand_ins.model_folders import VOCAB_SIZE, make_checkpoint
from tests.stand_ins.paths import PYTHONPATH
from tests.waiting import PATIENCE_S

MODEL = "checkpoint"
NUM_TOKENS = 24
RUNTIME = ("--runtime", "tensorrt_llm")
SPLITS = 'sluice_prompt_splits_total{{model="checkpoint",reason="{}"}}'
HANDED_OVER = 'sluice_prompt_handovers_total{model="checkpoint",outcome="handed_over"}'
PROMPTS = [[(first + 7 * position) % 250 + 3 for position in range(200)] for first in range(8)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "STAND_IN_VERSION": "1.3.0"}  # noqa: TID251 - PATH and more


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("disaggregation") / MODEL, with_tokenizer=True)


def start_engine(stack: ExitStack, checkpoint: Path, *options: str) -> "subprocess.Popen[str]":
    """Start an engine for gateways elsewhere, which says where it is ready."""
    command = (
        sys.executable,
        "-m",
        "sluice.cli",
        "engine",
        str(checkpoint),
        "--listen=tcp://127.0.0.1:0",
        *RUNTIME,
        *options,
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[HereServer]:
    setting = "cache_transceiver_config.backend=DEFAULT"
    options = {"context": ("--role", "prefill"), "generation": ("--engine-setting", setting)}
    with ExitStack() as stack:
        processes = {name: start_engine(stack, checkpoint, *each) for name, each in options.items()}
        engines = [{"name": name, "address": address_of(process)} for name, process in processes.items()]
        file = checkpoint.parent / "engines.json"
        file.write_text(json.dumps({"engines": engines}))
        yield stack.enter_context(serving_here(str(checkpoint), f"--engines={file}", "--prefill-min-tokens=64"))


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    found = re.search(r"ready at (tcp://\S+)", process.stdout.readline())
    assert found is not None
    return found[1]


@pytest.fixture
def client(server: HereServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=PATIENCE_S, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def expected(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return the text of an engine that computes the prompt itself."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(echo_next(ids, VOCAB_SIZE))
    detokenizer = tokenizer.detokenizer()
    return detokenizer.feed(ids[len(prompt) :]) + detokenizer.flush()


def counted(server: HereServer, counter: str) -> float:
    with server.client() as client:
        page = client.get(server.metrics_url).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(counter)}.* (\S+)$", page, re.MULTILINE))


@pytest.mark.parametrize(("place", "temperature"), [(0, 0.0), (2, 0.8)], ids=["greedy", "sampled"])
def test_an_answer_is_that_of_one_engine_streamed_or_not(
    server: HereServer, client: openai.OpenAI, tokenizer: Tokenizer, place: int, temperature: float
) -> None:
    before = counted(server, HANDED_OVER)
    how = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": temperature, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt=PROMPTS[place], **how)  # type: ignore[call-overload]
    assert whole.choices[0].text == expected(tokenizer, PROMPTS[place])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (200, NUM_TOKENS)
    assert whole.usage.prompt_tokens_details.cached_tokens == 192
    stream = client.completions.create(
        prompt=PROMPTS[place + 1], stream=True, stream_options={"include_usage": True}, **how
    )  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == expected(tokenizer, PROMPTS[place + 1])
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert counted(server, HANDED_OVER) == before + 2


def test_what_cannot_change_engines_is_answered_whole_and_alike(
    server: HereServer, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    """A penalty is such; one that is as small changes no token here."""
    before = {reason: counted(server, SPLITS.format(reason)) for reason in ("split", "whole")}
    split, whole = (
        client.completions.create(
            model=MODEL,
            prompt=PROMPTS[4],
            max_tokens=NUM_TOKENS,
            temperature=0,
            logprobs=1,
            frequency_penalty=penalty,
            extra_body={"ignore_eos": True, "cache_salt": f"salt {penalty}"},
        ).choices[0]
        for penalty in (0.0, 1e-6)
    )
    assert split.text == whole.text == expected(tokenizer, PROMPTS[4])
    assert split.logprobs == whole.logprobs
    assert {reason: counted(server, SPLITS.format(reason)) - before[reason] for reason in before} == {
        "split": 1,
        "whole": 1,
    }
