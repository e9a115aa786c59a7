"""LoRA adapters: equal to merged weights, apart from each other, and refused where they do not fit."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.frames import LoadAdapter, UnloadAdapter
from sluice.engine.runners.openvino.adapters import to_bf16
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.family_goldens import read_family
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.scripted_executor import ScriptedExecutor
from tests.goldens.checkpoints import write_checkpoint
from tests.under_test import load_runner, runtime

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "down_proj"]}
BASE = checkpoint_path("qwen3_tiny")
PROMPTS = [list(range(10, 10 + length)) for length in (3, 40, 70)]


def make_adapter(
    base: Path,
    folder: Path,
    seed: int,
    *,
    scale: float = 1.0,
    modules: tuple[str, ...] = ("q_proj", "down_proj"),
    **fields: Any,
) -> Path:
    """Write an adapter of random matrices for these modules of `base`."""
    generator = np.random.default_rng(seed)
    tensors = {}
    with safe_open(base / "model.safetensors", "numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    for name in (name for name in shapes if name.endswith(tuple(f"{module}.weight" for module in modules))):
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        num_rows, num_columns = shapes[name]
        for side, shape in (("A", (4, num_columns)), ("B", (num_rows, 4))):
            tensors[f"{prefix}.lora_{side}.weight"] = (scale * generator.standard_normal(shape) * 0.3).astype(
                np.float32
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """Copy a checkpoint with the adapter added to its weights."""
    shutil.copytree(base, folder)
    weights, stored = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in stored if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[target] = weights[target] + 2.0 * stored[name.replace("lora_A", "lora_B")] @ stored[name]
    save_file({name: np.ascontiguousarray(w, np.float32) for name, w in weights.items()}, folder / "model.safetensors")
    return folder


def open_engine(path: Path, adapters: dict[str, str] | None = None, **fields: Any) -> ScriptedExecutor:
    runner = load_runner(
        EngineConfig(
            **{"model_path": str(path), "dtype": "f32", "num_blocks": 60, "enable_lora": adapters is not None, **fields}
        )
    )
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "lora_modules": adapters or {}}
    return ScriptedExecutor(runner, **limits)  # type: ignore[arg-type]


def generate(engine: ScriptedExecutor, *names: str, first_id: int = 0) -> list[list[int]]:
    """Return the tokens of all prompts for each of `names` in turn, which run together."""
    ids = range(first_id, first_id + len(names) * len(PROMPTS))
    for stream_id in ids:
        name, prompt = divmod(stream_id - first_id, len(PROMPTS))
        engine.submit(stream_id, PROMPTS[prompt], adapter=names[name], max_tokens=12)
    engine.finish()
    assert not engine.failures
    return [engine.tokens[stream_id] for stream_id in ids]


@pytest.fixture
def base() -> Path:
    return BASE


@pytest.fixture(scope="module")
def engine() -> ScriptedExecutor:
    """An engine with room for adapters and none."""
    return open_engine(BASE, {})


def test_adapters_in_one_step_equal_their_merged_weights(base: Path, tmp_path: Path) -> None:
    folders = {name: make_adapter(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))}
    expected = generate(open_engine(base), "")
    for name, folder in folders.items():
        expected += generate(open_engine(merge(base, folder, tmp_path / f"{name}-merged")), "")
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    engine = open_engine(base, {name: str(folder) for name, folder in folders.items()})
    assert engine.executor.info.adapters == ("one", "two")
    assert generate(engine, "", "one", "two") == expected
    assert generate(engine, "two", first_id=50) == expected[6:], "from the prefix cache"


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bf16"},
        *(pytest.param({"quantization": each}, marks=pytest.mark.openvino) for each in ("int8", "int4")),
    ],
    ids=str,
)
def test_an_adapter_of_zeros_changes_nothing(base: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    if fields.get("dtype") == "bf16" and "BF16" not in _capabilities():
        pytest.skip("this CPU has no bf16")
    fields = {**fields, "cache_path": str(tmp_path / "cache")}
    folder = make_adapter(base, tmp_path / "none", 1, scale=0.0)
    changing = make_adapter(base, tmp_path / "one", 1)
    engine = open_engine(base, {"none": str(folder), "one": str(changing)}, **fields)
    plain = generate(open_engine(base, **fields), "")
    assert generate(engine, "none") == plain
    assert generate(engine, "one", first_id=20) != plain


@pytest.mark.parametrize(
    ("family", "module"),
    [("gpt2", "attn.c_attn"), ("gpt_neox", "attention.dense"), ("phi", "mlp.fc1"), ("phi", "dense")],
)
def test_adapters_know_the_names_of_each_family(family: str, module: str, tmp_path: Path) -> None:
    """GPT-2 has its matrices transposed, but not those of its adapters."""
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    write_checkpoint(read_family(family).blueprint, base)
    weights, generator = load_file(base / "model.safetensors"), np.random.default_rng(0)
    stored: dict[str, FloatArray] = {}
    for name in [name for name in weights if name.endswith(f"{module}.weight")]:
        rows, columns = weights[name].T.shape if family == "gpt2" else weights[name].shape
        a, b = (generator.standard_normal(shape).astype(np.float32) * 0.3 for shape in ((4, columns), (rows, 4)))
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        stored |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        weights[name] += 2 * ((b @ a).T if family == "gpt2" else b @ a)
    adapter.mkdir()
    save_file(stored, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG))
    shutil.copytree(base, merged)
    save_file(weights, merged / "model.safetensors")
    cache = str(tmp_path / "cache")
    adapted = generate(open_engine(base, {"one": str(adapter)}, cache_path=cache), "", "one")
    assert adapted[3:] == generate(open_engine(merged, cache_path=cache), "")
    assert adapted[3:] != adapted[:3]


def _capabilities() -> tuple[str, ...]:
    from sluice.engine.runners.openvino.runner import cpu_capabilities

    return cpu_capabilities()


def test_adapters_come_and_go_while_requests_run(base: Path, tmp_path: Path) -> None:
    one, two = (make_adapter(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    engine = open_engine(base, {})
    expected = [*generate(open_engine(base, {"a": str(one)}), "a"), *generate(open_engine(base, {"a": str(two)}), "a")]
    assert engine.change_adapters(LoadAdapter("a", str(one))).adapters == ("a",)
    engine.submit(0, PROMPTS[2], adapter="a", max_tokens=12)
    engine.step()
    release = hold_reading(engine)
    engine.script.pending.append(LoadAdapter("a", str(two)))  # other weights under the same name
    for _ in range(4):
        engine.step()
    assert len(engine.tokens[0]) > 3, "no step waits for what is read"
    release.set()
    engine.submit(1, PROMPTS[2], adapter="a", max_tokens=12)
    engine.finish()
    assert [engine.tokens[0], engine.tokens[1]] == [expected[2], expected[2]], "it is the old one until it is answered"
    while len(engine.outcomes) < 2:
        engine.step()
    assert generate(engine, "a", first_id=10) == expected[3:]
    engine.submit(30, PROMPTS[0], adapter="a", max_tokens=12)
    engine.step()
    assert engine.change_adapters(UnloadAdapter("a")).adapters == ()
    assert engine.change_adapters(UnloadAdapter("a")).code is ErrorCode.NOT_FOUND
    engine.finish()
    assert engine.tokens[30] == expected[3], "a request in flight ends with its adapter"
    assert engine.executor.info.adapters == ()
    while engine.executor._adapters.is_changing:
        engine.step()
    runner: Any = engine.runner
    stacks = runner._model.adapters if runtime() is Runtime.TORCH else runner._session.adapters
    assert not stacks._adapters, "its memory is free"
    engine.submit(31, PROMPTS[0], adapter="a", max_tokens=12)
    engine.finish()
    assert [failure.code for failure in engine.failures] == [ErrorCode.INVALID]


def hold_reading(engine: ScriptedExecutor) -> threading.Event:
    """Let the next adapter be read only once the returned event is set."""
    release, runner = threading.Event(), engine.runner
    read = runner.read_adapter

    def held(*arguments: Any) -> Any:
        assert release.wait(60)
        return read(*arguments)

    runner.read_adapter = held  # type: ignore[method-assign,assignment]
    return release


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"use_dora": True}, ErrorCode.UNIMPLEMENTED, "use_dora must not be set, got True"),
        ({"bias": "all"}, ErrorCode.UNIMPLEMENTED, "bias must be none, got 'all'"),
        ({"modules_to_save": ["lm_head"]}, ErrorCode.UNIMPLEMENTED, "modules_to_save must not be set"),
        ({"peft_type": "IA3"}, ErrorCode.UNIMPLEMENTED, "peft_type must be LORA, got 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, ErrorCode.UNIMPLEMENTED, "changes the base model too"),
        ({"r": 8}, ErrorCode.INVALID, "must have shape (8, "),
        ({"r": True}, ErrorCode.INVALID, "r must be a whole number above 0, got True"),
        ({"rank_pattern": {"q_proj": -1}}, ErrorCode.INVALID, "rank_pattern['q_proj'] must be a whole number"),
        ({"rank_pattern": {"(": 1}}, ErrorCode.INVALID, "rank_pattern must have regular expressions"),
        ({"lora_alpha": "x"}, ErrorCode.INVALID, "lora_alpha must be a number above 0, got 'x'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_not_plain_lora_is_refused(
    engine: ScriptedExecutor, tmp_path: Path, fields: dict[str, Any], code: ErrorCode, words: str
) -> None:
    outcome = engine.change_adapters(LoadAdapter("bad", str(make_adapter(BASE, tmp_path / "bad", 1, **fields))))
    assert (outcome.code, outcome.message.startswith("LoRA adapter bad: ")) == (code, True)
    assert words in outcome.message


def test_an_engine_with_a_bad_adapter_does_not_start(tmp_path: Path) -> None:
    folder = make_adapter(BASE, tmp_path / "bad", 1, bias="all")
    with pytest.raises(SluiceError, match=r"^LoRA adapter bad: .*: bias must be none"):
        open_engine(BASE, {"bad": str(folder)})


def test_bad_weights_hurt_no_running_engine(base: Path, tmp_path: Path) -> None:
    good = make_adapter(base, tmp_path / "good", 1)
    engine = open_engine(base, {"good": str(good)})
    before = generate(engine, "", "good")
    folder = make_adapter(base, tmp_path / "bad", 1)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    damages = [
        {**tensors, first: tensors[first] * np.float32(np.nan)},
        {**tensors, "base_model.model.lm_head.lora_A.weight": tensors[first]},
        {name: tensor for name, tensor in tensors.items() if name != first},
        {**tensors, first: tensors[first][:, :-1].copy()},
        {},
    ]
    for tensors in damages:
        save_file(tensors, file)
        assert refusal_of(engine, folder), tensors.keys()
    file.write_bytes(b"no header")
    assert "damaged" in refusal_of(engine, folder)
    file.unlink()
    assert "has no file adapter_model.safetensors" in refusal_of(engine, folder)
    (folder / "adapter_config.json").write_bytes(b"\xff{")
    assert "is not a JSON object" in refusal_of(engine, folder)
    assert "cannot be read" in refusal_of(engine, tmp_path / "nowhere")
    assert engine.executor.info.adapters == ("good",)
    assert generate(engine, "", "good", first_id=20) == before


def refusal_of(engine: ScriptedExecutor, folder: Path) -> str:
    outcome = engine.change_adapters(LoadAdapter("bad", str(folder)))
    assert outcome.code in (ErrorCode.INVALID, ErrorCode.NOT_FOUND, ErrorCode.UNIMPLEMENTED)
    assert outcome.message.startswith("LoRA adapter bad: ")
    return outcome.message


def test_a_model_without_room_for_adapters_says_so(base: Path, tmp_path: Path) -> None:
    engine = open_engine(base)
    outcome = engine.change_adapters(LoadAdapter("a", str(make_adapter(base, tmp_path / "a", 1))))
    assert outcome.code is ErrorCode.UNIMPLEMENTED
    assert ScriptedExecutor().change_adapters(LoadAdapter("a", "/a")).message.startswith("the runtime echo has")


def test_bf16_is_rounded_to_the_nearest() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7 - 2**-10], np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF81]
