"""Adapters at run time, and sleep, of one engine: after a crash, and in versions and engines that lack something."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.version import Version

from sluice.engine.delegated.tensorrt_llm.adapters import MODULE_NAMES, Adapters, LoraRoom
from sluice.engine.delegated.tensorrt_llm.folder import read_folder
from sluice.engine.delegated.tensorrt_llm.sleeping import Sleeper
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.over_stand_in import StandIn, answer, echo, request, running, tokens
from tests.stand_ins.model_folders import make_adapter, make_checkpoint, make_compiled_engine
from tests.waiting import until

PROMPT = list(range(10, 90))


@pytest.fixture
def oldest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, "1.2.1")


async def test_a_new_engine_has_the_adapter_and_sleeps_as_the_lost_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.4.0")
    async with stand_in.client(enable_lora=True, enable_sleep_mode=True) as client:
        assert client.info.can_sleep
        await client.load_adapter("poet", make_adapter(tmp_path / "poet"))
        before = await tokens(client.submit(request(PROMPT, 8, adapter="poet")))
        digests = client.info.adapter_digests
        assert (before != echo(PROMPT, 8), [*digests]) == (True, ["poet"])
        await client.sleep(1, "wait")
        assert client.pid is not None
        psutil.Process(client.pid).kill()
        await until(lambda: client.is_restarting)
        late, plain = client.submit(request(PROMPT, 8, adapter="poet")), client.submit(request(PROMPT, 8))
        await until(lambda: not client.is_restarting and client.stats.num_waiting == 2)
        assert client.is_sleeping
        await client.wake_up()
        assert (await tokens(late), await tokens(plain)) == (before, echo(PROMPT, 8))
        assert client.info.adapter_digests == digests


async def test_an_answer_in_two_parts_keeps_its_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, "1.4.0").set(STEP_MS=20)
    asked = request(PROMPT, 40, adapter="poet", min_tokens=30, ignore_eos=False, stop_token_ids=(7,))
    async with stand_in.client(heartbeat_timeout_s=25.0, enable_lora=True) as client:
        await client.load_adapter("poet", make_adapter(tmp_path / "poet"))
        whole = await tokens(client.submit(asked))
        stream = await running(client, asked)
        await client.unload_adapter("poet")
        assert await tokens(stream) == whole


async def test_an_older_version_sleeps_at_level_0_alone(oldest: StandIn) -> None:
    oldest.set(STEP_MS=2)
    async with oldest.client(enable_sleep_mode=True) as client:
        stream = client.submit(request(PROMPT, 50))
        with pytest.raises(SluiceError, match=r"TensorRT-LLM 1\.2\.1 can give no memory back.* 1\.4") as caught:
            await client.sleep(1, "abort")
        assert (caught.value.code, client.is_sleeping) == (ErrorCode.UNIMPLEMENTED, False)
        await client.sleep(0, "wait")
        assert (await answer(stream)).reason is FinishReason.LENGTH
        late = client.submit(request(PROMPT, 8))
        await until(lambda: client.stats.num_waiting == 1)
        await client.wake_up()
        assert await tokens(late) == echo(PROMPT, 8)


async def test_an_adapter_of_an_engine_that_was_compiled_for_it(oldest: StandIn, tmp_path: Path) -> None:
    for built, words in (
        ({"lora_plugin": "auto"}, ""),
        ({"lora_plugin": None}, "without room for LoRA adapters; --allow-runtime-lora-updating makes it"),
    ):
        lora = {"max_lora_rank": 16, "lora_target_modules": ["attn_q", "attn_v"]}
        engine = make_compiled_engine(tmp_path / f"lora{len(words)}", plugin_config=built, lora_config=lora)
        config: dict[str, Any] = {"model_path": str(engine), "tokenizer_path": str(oldest.model), "enable_lora": True}
        async with oldest.client(**config) as client:
            if words:
                with pytest.raises(SluiceError, match=words):
                    await client.load_adapter("poet", str(tmp_path / "poet"))
                continue
            await client.load_adapter("poet", make_adapter(tmp_path / "poet", rank=16))
            assert await tokens(client.submit(request(PROMPT, 8, adapter="poet"))) != echo(PROMPT, 8)
            odds: tuple[dict[str, Any], ...] = ({"rank": 17}, {"modules": ("q_proj", "o_proj")})
            for odd in odds:
                with pytest.raises(SluiceError, match="LoRA adapter odd: it"):
                    await client.load_adapter("odd", make_adapter(tmp_path / "odd", **odd))
            await client.unload_adapter("poet")
            with pytest.raises(SluiceError, match="no adapter 'poet'"):
                client.submit(request(PROMPT, adapter="poet"))


class Library:
    """TensorRT-LLM as far as requests for adapters go."""

    def lora_request(self, name: str, number: int, path: str) -> Any:
        return Made(number)


class Made:
    def __init__(self, number: int) -> None:
        self.lora_int_id = number


async def test_a_number_is_of_the_same_weights_for_good(tmp_path: Path) -> None:
    room = LoraRoom(8, frozenset(MODULE_NAMES.values()), MODULE_NAMES, read_folder(make_checkpoint(tmp_path / "model")))
    adapters = Adapters(Library(), {"a": make_adapter(tmp_path / "a")}, room)  # type: ignore[arg-type]
    proven: list[int] = []

    async def prove(made: Made) -> None:
        proven.append(made.lora_int_id)
        if error is not None:
            raise error

    error: Exception | None = SluiceError(ErrorCode.INTERNAL, "no such kernel")
    other = make_adapter(tmp_path / "b", seed=1)
    with pytest.raises(SluiceError, match=r"TensorRT-LLM does not take LoRA adapter a in .*: no such kernel") as caught:
        await adapters.load("a", other, prove)
    assert (caught.value.code, adapters.request("a").lora_int_id) == (ErrorCode.INVALID, 1), "the old one stays"
    error = TimeoutError()
    with pytest.raises(SluiceError, match="try again when fewer requests run"):
        await adapters.load("a", other, prove)
    error = None
    for path in (other, str(tmp_path / "a"), other):
        await adapters.load("a", path, prove)
    assert proven == [2, 3, 4, 1, 4]
    adapters.unload("a")
    assert adapters.digests == {}
    await asyncio.gather(*(adapters.load(name, other, prove) for name in ("x", "y")))
    numbers = {adapters.request(name).lora_int_id for name in ("x", "y")}
    assert numbers == {4}, "the same files share blocks and memory"


class Workers:
    """Workers that fail to sleep with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error, self.woken = error, list[str]()

    def _collective_rpc(self, method: str, arguments: tuple[list[str]]) -> Any:
        if method == "sleep":
            raise self._error
        self.woken += arguments[0]


@pytest.mark.parametrize(
    ("error", "raised", "is_woken"),
    [(RuntimeError("rank 1: out of memory"), RuntimeError, True), (ValueError("not enabled"), SluiceError, False)],
)
async def test_what_may_be_away_after_a_failure_is_woken(error: Exception, raised: Any, is_woken: bool) -> None:
    sleeper = Sleeper(workers := Workers(error), Version("1.4.0"), can_release=True)
    with pytest.raises(raised):
        await sleeper.sleep(1, asyncio.Event())
    assert {"kv_cache", "model_weights"} <= {*workers.woken} if is_woken else not workers.woken
    assert not sleeper.is_asleep and sleeper.salt, "blocks of before the sleep may be empty"
