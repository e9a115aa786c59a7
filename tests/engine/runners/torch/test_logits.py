"""Logits on a device against those on the host: the same states, logits and random numbers through the sampler."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Rows
from sluice.engine.guidance.matching import FewAllowed, FewForbidden, Mixed, new_bitmask, to_mask
from sluice.engine.runners.base import Edits, Logits, StepBatch, TokenMask
from sluice.engine.sampling.cores import ONE_CORE
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.sampling.sampler import NO_TOKEN, Samples, collect_edits, sample, uniform
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import EventDetail, SamplingParams, TokenLogprob
from sluice.errors import ErrorCode, SluiceError
from tests.engine.fake_runner import EchoRunner
from tests.engine.sampling.reference import tokens_possible
from tests.engine.scripted_executor import ScriptedExecutor

if not find_spec("torch"):
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sluice.engine.runners.torch import logits as logits_module
from sluice.engine.runners.torch.draw import Parameters, draw
from sluice.engine.runners.torch.logits import DeviceLogits, wrap_logits

pytestmark = pytest.mark.torch

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (7, 50, 129, 900, 5003)


def on_device(values: FloatArray) -> torch.Tensor:
    """Return a copy of `values` on a GPU, or on the CPU where there is none."""
    return torch.tensor(values, device=DEVICE)


class StaysThere(DeviceLogits):
    """Fails where a row is read to the host."""

    def read(self, rows: Rows | None = None) -> FloatArray:
        raise AssertionError("a row was read")


class RandomMask:
    """A constraint to random sets of tokens, of every form of a mask; one in twenty fails."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._num_accepted = 0

    def prepare(self) -> None:
        """Do nothing."""

    def mask(self) -> TokenMask:
        rng = np.random.default_rng((self._seed, self._num_accepted))
        if rng.random() < 0.05:
            raise SluiceError(ErrorCode.INVALID, "the grammar is too complex")
        bits = rng.random(self._vocab_size) < rng.choice([0.02, 0.5, 0.98])
        bits[rng.integers(self._vocab_size)] = True
        words = new_bitmask(self._vocab_size)
        words.view(np.uint8)[: -(-self._vocab_size // 8)] = np.packbits(bits, bitorder="little")
        mask = to_mask(words, self._vocab_size, self._vocab_size)
        assert mask is not None
        return mask

    def accept(self, token_id: int) -> None:
        self._num_accepted += 1


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> FloatArray:
    """Return logits of any shape: flat, peaked, or with many ties. Some rows are no numbers."""
    values = rng.normal(0, rng.choice([0.5, 2, 6], (num_rows, 1)), (num_rows, vocab_size)).astype(np.float32)
    if rng.random() < 0.4:
        values = np.round(values)
    values[rng.random(num_rows) < 0.05] = np.nan
    values[rng.random(num_rows) < 0.05, 0] = rng.choice([np.nan, np.inf, -np.inf])
    return values


def random_state(rng: np.random.Generator, vocab_size: int, *, has_mask: bool) -> SamplingState:
    """Return a state with any of the parameters. The same generator gives the same state."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, rng.integers(0, most)).tolist())

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.3 else otherwise

    fields = {
        "temperature": float(rng.choice([0.0, 0.3, 0.8, 1.7])),
        "top_k": int(rng.choice([0, 0, 1, 7, 50, 400])),
        "top_p": float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.1])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05])),
        "typical_p": float(rng.choice([1.0, 1.0, 1.0, 0.9, 0.4])),
        "repetition_penalty": maybe(1.3, 1.0),
        "presence_penalty": maybe(0.7, 0.0),
        "frequency_penalty": maybe(-0.4, 0.0),
        "logit_bias": maybe({token_id: float(rng.normal(0, 4)) for token_id in ids(5)}, {}),
        "bad_words": maybe((*((token_id,) for token_id in ids(4)), (1, 2), (2, 0, 3)), ()),
        "allowed_token_ids": maybe(ids(6), ()),
        "min_tokens": maybe(2, 0),
        "logprobs": maybe(int(rng.choice([0, 3, 20])), None),
    }
    params = SamplingParams(max_tokens=100, seed=int(rng.integers(2**40)), **fields)
    constraint = RandomMask(int(rng.integers(2**32)), vocab_size) if has_mask else None
    return SamplingState(params, ids(12), frozenset({0, 5}), vocab_size, (), constraint)


@example(4036220367, 50, 6, True)  # two tokens are as near to the mean surprise, but for float32's rounding
@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from(SIZES), st.integers(1, 12), st.booleans())
def test_the_device_chooses_what_the_host_chooses(seed: int, vocab_size: int, num_states: int, has_masks: bool) -> None:
    rng = np.random.default_rng(seed)
    num_rows = num_states + int(rng.integers(3))
    there, here = (
        [random_state(np.random.default_rng((seed, i)), vocab_size, has_mask=has_masks) for i in range(num_states)]
        for _ in range(2)
    )
    for _ in range(4):
        logits = random_logits(rng, num_rows, vocab_size)
        if has_masks:  # see DeviceLogits
            logits = np.nan_to_num(logits, nan=0.0, posinf=9.0, neginf=-np.inf)
        rows = rng.integers(0, num_rows, num_states) if rng.random() < 0.3 else rng.permutation(num_rows)[:num_states]
        expected = sample(HostLogits(logits.copy()), here, rows)
        found = sample(StaysThere(on_device(logits)), there, rows)
        token_ids = expected.token_ids.tolist()
        differing = np.flatnonzero(expected.token_ids != found.token_ids)
        for i in differing:
            assert {token_ids[i], int(found.token_ids[i])} <= possible(logits[rows[i]], here[i]), here[i].params
        assert told(found, differing) == told(expected, differing)
        assert_logprobs(found, expected, differing)
        for ours, theirs, token_id in zip(there, here, token_ids, strict=True):
            ours.observe(max(token_id, 0))
            theirs.observe(max(token_id, 0))


def possible(row: FloatArray, state: SamplingState) -> set[int]:
    """Return the tokens that a draw may give, as float32 rounds."""
    host = HostLogits(row[None].copy())
    host.edit(collect_edits(np.arange(1), [state])[0])
    number = uniform(np.array([state.seed], np.uint64), np.array([state.num_output], np.uint64))
    return tokens_possible(host.values[0], state.params, float(number[0])) if state.is_random else set()


def told(samples: Samples, differing: NDArray[np.intp]) -> dict[int, tuple[ErrorCode, str]]:
    assert not set(differing.tolist()) & samples.failed.keys()
    assert all(samples.token_ids[i] == NO_TOKEN for i in samples.failed)
    return {i: (error.code, error.message) for i, error in samples.failed.items()}


def assert_logprobs(found: Samples, expected: Samples, differing: NDArray[np.intp]) -> None:
    assert (found.logprobs is None) == (expected.logprobs is None)
    for i, (ours, theirs) in enumerate(zip(found.logprobs or (), expected.logprobs or (), strict=True)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None and i not in differing:
            assert_close(ours, theirs)


def assert_close(ours: TokenLogprob, theirs: TokenLogprob) -> None:
    assert ours.token_id == theirs.token_id
    assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
    values = [theirs.logprob, *(value for _, value in theirs.top)]
    assert [ours.logprob, *(value for _, value in ours.top)] == pytest.approx(values, abs=1e-5, nan_ok=True)


def test_hardly_a_token_of_thousands_differs() -> None:
    rng, differing = np.random.default_rng(3), 0
    for vocab_size, num_rows in ((1000, 1000), (8192, 120), (40_000, 40)):
        for _ in range(2):
            logits = rng.normal(0, rng.choice([0.5, 2, 6], (num_rows, 1)), (num_rows, vocab_size)).astype(np.float32)
            states = [random_state(np.random.default_rng(seed), vocab_size, has_mask=False) for seed in range(num_rows)]
            expected = sample(HostLogits(logits.copy()), states).token_ids
            differing += int((sample(DeviceLogits(on_device(logits)), states).token_ids != expected).sum())
    assert differing <= 2


class Waits(TorchDispatchMode):  # type: ignore[misc]
    """Fails where an operation waits for the device to know a number or a size."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        is_mask = name in ("index", "index_put_") and any(each.dtype == torch.bool for each in args[1])
        assert not is_mask, "a mask as an index"
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"), name
        return function(*args, **(kwargs or {}))


def test_no_operation_waits_for_a_number_of_the_device() -> None:
    states = [random_state(np.random.default_rng(seed), 900, has_mask=seed % 2 == 0) for seed in range(40)]
    with Waits():
        sample(DeviceLogits(on_device(random_logits(np.random.default_rng(0), 40, 900))), states)
    for wait in (lambda: torch.ones(3)[torch.ones(3) > 0], lambda: bool(torch.ones(1) > 0)):
        with pytest.raises(AssertionError), Waits():
            wait()


def test_likely_and_drawn_tokens_come_to_the_host_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    fetch = logits_module._fetch

    def counted(parts: Any) -> Any:
        pieces.append(len(parts))
        return fetch(parts)

    monkeypatch.setattr(logits_module, "_fetch", counted)
    states = [
        SamplingState(SamplingParams(temperature=row % 2, seed=row), [], frozenset(), 50, (), None) for row in range(6)
    ]
    sample(DeviceLogits(on_device(random_logits(np.random.default_rng(1), 6, 50))), states)
    assert pieces == [2]


@pytest.mark.parametrize("kind", [FewAllowed, FewForbidden, Mixed])
def test_every_form_of_a_mask_leaves_the_same_logits(kind: type) -> None:
    vocab_size, rng = 901, np.random.default_rng(5)
    masks = [RandomMask(seed, vocab_size) for seed in range(30)]
    chosen = [mask for one in masks if (mask := mask_of(one)) is not None and isinstance(mask, kind)]
    assert len(chosen) > 3
    values = rng.normal(0, 3, (2 * len(chosen), vocab_size)).astype(np.float32)
    edits = Edits(masks=[(2 * i, mask) for i, mask in enumerate(chosen)])
    host, device = HostLogits(values.copy()), DeviceLogits(on_device(values))
    host.edit(edits)
    device.edit(edits)
    np.testing.assert_array_equal(device.read(), host.read())
    np.testing.assert_array_equal(device.read()[1::2], values[1::2])


def mask_of(constraint: RandomMask) -> TokenMask | None:
    try:
        return constraint.mask()
    except SluiceError:
        return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_edited_and_weighed_in_float32(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    short = on_device(rng.normal(0, 3, (24, 700)).astype(np.float32)).to(dtype)
    states = [random_state(np.random.default_rng(seed), 700, has_mask=False) for seed in range(24)]
    expected = sample(HostLogits(short.float().cpu().numpy()), states)
    found = sample(DeviceLogits(short), states)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert_logprobs(found, expected, np.array([], np.intp))


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.3)])
def test_weights_apart_by_a_rounding_are_told_apart(top_k: int, top_p: float) -> None:
    """exp(-1) is seven steps of float32 above the weights of the others."""
    logits = np.full((64, 10), -1 - 6e-7, np.float32)
    logits[:, :2] = 0, -1
    params = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed, top_k=top_k, top_p=top_p) for seed in range(64)]
    states = [SamplingState(each, [1], frozenset(), 10) for each in params]
    assert set(sample(DeviceLogits(on_device(logits)), states).token_ids.tolist()) == {0, 1}


def test_what_is_in_the_hosts_memory_stays_with_numpy() -> None:
    values = torch.zeros(2, 9)
    wrapped = wrap_logits(values, ONE_CORE)
    assert isinstance(wrapped, HostLogits)
    wrapped.values[1, 4] = 7.0
    assert values[1, 4] == 7.0, "no copy"
    assert isinstance(wrap_logits(torch.empty(2, 9, device="meta"), ONE_CORE), DeviceLogits)


def test_parts_of_the_rows_give_what_all_give(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (25, 300)).astype(np.float32)
    states = [random_state(np.random.default_rng(seed), 300, has_mask=seed % 3 == 0) for seed in range(25)]
    whole = sample(DeviceLogits(on_device(logits)), states)
    monkeypatch.setattr(logits_module, "_BLOCK", 700)
    parts = sample(DeviceLogits(on_device(logits)), states)
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert_logprobs(parts, whole, np.array([], np.intp))


def test_log_probabilities_of_a_prompt_are_the_hosts() -> None:
    rng = np.random.default_rng(2)
    logits, token_ids = np.round(rng.normal(0, 2, (40, 3000)), 1).astype(np.float32), rng.integers(0, 3000, 40)
    both: list[Logits] = [HostLogits(logits), StaysThere(on_device(logits))]
    expected, found = (each.logprobs(np.arange(3, 40), token_ids[3:], [20] * 37) for each in both)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    assert both[1].logprobs(np.arange(0), token_ids[:0], []) == []
    assert [entry.top for entry in both[1].logprobs(np.arange(2), token_ids[:2], [0, 0])] == [[], []]


def test_a_kernel_draws_all_rows_but_those_with_typical_p() -> None:
    calls = []

    def fused(logits: torch.Tensor, sharpness: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        top_k, top_p, min_p, number = others
        calls.append(len(logits))
        assert (top_k <= logits.shape[1]).all()
        parameters = Parameters(sharpness, top_k, top_p, min_p, torch.ones_like(top_p), number)
        return draw(logits, logits.amax(1), last_draws[-1], parameters)

    last_draws: list[Any] = []

    class Noted(DeviceLogits):
        def _draw(self, draws: Any) -> Any:
            last_draws.append(draws)
            return super()._draw(draws)

    logits = np.random.default_rng(1).normal(0, 3, (3, 300)).astype(np.float32)
    for typical_p, num_calls in ((1.0, 1), (0.9, 0)):
        params = [
            SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=seed, typical_p=typical_p)
            for seed in range(3)
        ]
        states = [SamplingState(each, [1], frozenset(), 300) for each in params]
        calls.clear()
        found = sample(Noted(on_device(logits), fused), states)
        assert found.token_ids.tolist() == sample(HostLogits(logits), states).token_ids.tolist()
        assert len(calls) == num_calls


class DeviceRunner(EchoRunner):
    """An EchoRunner whose logits are a tensor's."""

    def run(self, batch: StepBatch) -> Any:
        return DeviceLogits(on_device(self.compute(batch)).bfloat16())


def test_the_executor_reports_what_it_reports_of_the_host() -> None:
    """Logits and log probabilities of prompt and output, chunks of the prompt, speculation."""

    def run(kind: type[EchoRunner]) -> tuple[list[int], EventDetail, dict[int, list[int]]]:
        runners = [kind(num_blocks=40, block_size=4, max_model_len=64) for _ in range(2)]
        bench = ScriptedExecutor(*runners, speculation="draft_model", max_num_batched_tokens=8)
        bench.submit(
            1, list(range(20)), max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=2,
            returns_context_logits=True, returns_generation_logits=True,
        )  # fmt: skip
        bench.submit(2, [3, 4, 5], max_tokens=9, temperature=1.0, top_p=0.9, seed=4, repetition_penalty=1.2)
        bench.finish()
        assert not bench.failures
        return bench.tokens[1], bench.details[1], bench.tokens

    (tokens, detail, all_tokens), (expected, expected_detail, expected_all) = run(DeviceRunner), run(EchoRunner)
    assert (tokens, all_tokens) == (expected, expected_all)
    assert detail.context_logits == expected_detail.context_logits
    assert detail.generation_logits == expected_detail.generation_logits
    assert detail.prompt_logprobs is not None
    assert expected_detail.prompt_logprobs is not None
    for ours, theirs in zip(detail.prompt_logprobs[1:], expected_detail.prompt_logprobs[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert_close(ours, theirs)
