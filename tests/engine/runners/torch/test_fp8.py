"""Weights and activations in 8-bit floats: at load, and as checkpoints store them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.agreement import LENGTH, compare, logits, read_texts
from sluice.errors import ErrorCode
from tests import paths
from tests.engine.runners.drive import NAN_BYTE, continuations, prefill, uniform_batch
from tests.engine.runners.family_goldens import read_family
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.runners.torch.loaded import Loaded, config, load_family
from tests.engine.runners.torch.loaded import load as load_runner
from tests.errors import error_of
from tests.goldens.checkpoints import write_checkpoint
from tests.under_test import load_runner as load_default

pytestmark = pytest.mark.torch

import torch  # noqa: E402 - `loaded` skips this file where torch is missing
from safetensors.torch import load_file, save_file  # noqa: E402

from sluice.engine.runners.torch.fp8 import TYPE, Fp8Use, ScaledMatrix, choose_fp8, quantize_rows  # noqa: E402
from sluice.engine.runners.torch.model import open_checkpoint  # noqa: E402
from sluice.engine.runners.torch.weights import Part  # noqa: E402

RILL, LLAMA = paths.MODELS / "rill" / "1", checkpoint_path("llama_tiny")
PROMPT = np.random.default_rng(0).integers(3, 192, 40).tolist()
FP8: dict[str, Any] = {"quantization": "fp8"}
Tensors = dict[str, torch.Tensor]


def rows_of(runner: Loaded) -> np.ndarray[Any, np.dtype[np.float64]]:
    return prefill(runner, PROMPT, [*range(len(PROMPT))]).astype(np.float64)


def cosine(actual: Loaded, expected: Loaded) -> float:
    """Return the mean cosine similarity of the logits."""
    a, b = rows_of(actual), rows_of(expected)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).mean())


# -- rows


def test_rows_are_as_exact_as_three_bits_are() -> None:
    values = torch.randn(6, 100)
    values[1], values[2] = 0, 1e6
    codes, scales = quantize_rows(values)
    assert (codes.dtype, scales.shape) == (TYPE, (6, 1))
    restored = codes.float() * scales
    assert (codes.float().abs().amax(1)[[0, 2, 3, 4, 5]] == 448).all()
    assert not restored[1].any()
    error = (restored - values).abs()
    assert (error <= values.abs() / 16 + scales * 2**-10).all()


def test_a_row_of_nan_or_infinity_stays_one() -> None:
    values = torch.randn(3, 32)
    values[0, 5], values[1, 5] = torch.nan, torch.inf
    codes, scales = quantize_rows(values)
    assert (codes.float() * scales).isnan().any(1).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_products_are_those_of_the_rounded_values(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    x, bias = torch.randn(num_rows, 64).to(dtype), torch.randn(48).to(dtype) if has_bias else None
    matrix = ScaledMatrix(*quantize_rows(torch.randn(48, 64)))
    found = matrix.linear(x, bias)
    codes, scales = quantize_rows(x)
    expected = (codes.double() * scales) @ (matrix.codes.double() * matrix.scales).T + (0 if bias is None else bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.05, rtol=0.01)


# -- at load


def test_the_bundled_model_agrees() -> None:
    """It has 8 M weights; larger models lose less. int8, whose activations are exact, is at 0.0007, int4 at 0.036."""
    texts = [next(read_texts(RILL))[:LENGTH]]
    exact = logits(load_runner(config(RILL)), texts)
    runner = load_runner(config(RILL, **FP8))
    assert runner.info.quantization == "fp8"
    distance = compare(logits(runner, texts), exact, texts)
    assert distance.same_token > 0.87
    assert 0.001 < distance.divergence < 0.015


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_short_types_agree_too(dtype: str) -> None:
    """With the same codes in float32: weights are stored in bf16, and what lies between them is rounded."""
    assert cosine(load_runner(config(LLAMA, dtype=dtype, **FP8)), load_runner(config(LLAMA, **FP8))) > 0.98


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "gpt2", "lfm2", "qwen2", "qwen3_moe_some_layers"])
def test_families_agree(name: str, tmp_path: Path) -> None:
    """Biases, latent attention, convolutions, experts. The weights are random and wide, which loses far more than
    trained ones do, and gemma2 scales them up."""
    runner, golden = load_family(name, tmp_path, **FP8)
    prompt, expected = golden.cases[-1].prompt_token_ids, np.array(golden.logits)
    found = prefill(runner, prompt, [len(prompt) // 2, len(prompt) - 1])
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > (0.6 if name == "gemma2" else 0.85)


def test_embeddings_heads_norms_and_routers_stay_as_they_are(tmp_path: Path) -> None:
    runner, _ = load_family("qwen3_moe_some_layers", tmp_path, **FP8)
    weights = runner._model._weights
    scaled = {name for names, matrix in weights._scaled.items() if matrix is not None for name in names}
    assert {name.split(".")[-2] for name in scaled} >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"}
    assert not any(".mlp.gate." in name or "embed" in name or "lm_head" in name or "norm" in name for name in scaled)
    assert not scaled & {name for name in weights._tensors if isinstance(name, str)}


def test_graphs_and_chunks_change_nothing_but_rounding() -> None:
    plain = load_runner(config(LLAMA, **FP8))
    graphs = load_runner(config(LLAMA, runtime_settings={"graphs": "true"}, **FP8))
    batch = uniform_batch(3, num_new=1, num_past=20)
    np.testing.assert_allclose(graphs.run(batch).read(), plain.run(batch).read(), atol=1e-4)


def test_a_sequence_of_nan_harms_no_other() -> None:
    runner, batch = load_runner(config(LLAMA, **FP8)), uniform_batch(num_seqs=6, num_new=5, num_past=40)
    clean = runner.run(batch).read().copy()
    runner.write_blocks(range(2), [np.full(runner.block_bytes, NAN_BYTE, np.uint8)] * 2)
    spoilt = runner.run(batch).read()
    assert np.isnan(spoilt[0]).any()
    np.testing.assert_array_equal(spoilt[1:], clean[1:])


def test_blocks_of_compressed_weights_are_others() -> None:
    assert load_runner(config(LLAMA)).block_identity != load_runner(config(LLAMA, **FP8)).block_identity


@pytest.mark.parametrize(("capability", "use"), [((8, 9), Fp8Use.STORED), ((9, 0), Fp8Use.STORED), ((8, 6), None)])
def test_gpus_without_units_for_it_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], use: Fp8Use | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    cuda = torch.device("cuda")
    assert choose_fp8("none", cuda) is (use or Fp8Use.NEVER)
    if use is not None:
        assert choose_fp8("fp8", cuda) is Fp8Use.ALWAYS
        return
    error = error_of(choose_fp8, "fp8", cuda)
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "quantization")
    assert "needs a GPU of compute capability 8.9 or higher; NVIDIA A10 has 8.6" in error.message


# -- checkpoints

Store = Callable[[Tensors, str, torch.Tensor], None]
"""(tensors, name of a projection, its matrix) -> the tensors with the codes and their scales."""


def by_blocks(tensors: Tensors, name: str, matrix: torch.Tensor) -> None:
    """As DeepSeek and Qwen do."""
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(rows, columns, dtype=TYPE)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scales[i, j] = matrix[block].abs().max() / 448
            codes[block] = (matrix[block] / scales[i, j]).to(TYPE)
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = codes, scales


def by_rows(tensors: Tensors, name: str, matrix: torch.Tensor) -> None:
    """As llm-compressor does; scales in bf16."""
    scales = (matrix.abs().amax(1, keepdim=True) / 448).bfloat16()
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = (matrix / scales.float()).to(TYPE), scales


def by_tensor(tensors: Tensors, name: str, matrix: torch.Tensor) -> None:
    """As ModelOpt does, with a scale of the input, which is not used."""
    scale = matrix.abs().max() / 448
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = (matrix / scale).to(TYPE), scale
    tensors[f"{name}.input_scale"] = torch.tensor(0.01)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
FORMS: list[tuple[Store, dict[str, Any]]] = [
    (by_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    (by_rows, {**COMPRESSED, "config_groups": {"0": {"weights": ROWS}}}),
    (by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
]


def store(source: Path, target: Path, how: Store, section: dict[str, Any]) -> tuple[Path, Path]:
    """Write the checkpoint as it would be stored in 8 bits, and one of the same values in float32."""
    exact = shutil.copytree(source, target / "exact")
    stored = shutil.copytree(source, target / "stored")
    tensors: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and name.endswith("_proj.weight"):
            how(tensors, name.removesuffix(".weight"), tensor.float())
        else:
            tensors[name] = tensor
    save_file(tensors, stored / "model.safetensors")
    save_file({name: value_of(tensors, name) for name in tensors if "scale" not in name}, exact / "model.safetensors")
    edit(stored, quantization_config=section)
    return stored, exact


def value_of(tensors: Tensors, name: str) -> torch.Tensor:
    codes = tensors[name]
    if codes.dtype != TYPE:
        return codes
    scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
    assert scale is not None
    if scale.dim() == 2 and scale.shape[1:] != (1,):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return codes.float() * scale.float()


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), **fields}))


@pytest.mark.parametrize(("how", "section"), FORMS)
def test_stored_codes_have_their_values(how: Store, section: dict[str, Any], tmp_path: Path) -> None:
    """Computed in float32 on a CPU. The bundled model's matrices have several blocks, and parts of some."""
    stored, exact = (load_runner(config(folder)) for folder in store(RILL, tmp_path, how, section))
    assert stored.info.quantization == "none"
    np.testing.assert_array_equal(rows_of(stored), rows_of(exact))


@pytest.mark.parametrize(("how", "section"), FORMS[1:])
def test_stored_codes_are_multiplied_as_they_are(how: Store, section: dict[str, Any], tmp_path: Path) -> None:
    folder, exact = store(LLAMA, tmp_path, how, section)
    runner = load_runner(config(folder, **FP8))
    assert runner.info.quantization == "fp8"
    stored = load_file(folder / "model.safetensors")
    scaled = [(names, each) for names, each in runner._model._weights._scaled.items() if each is not None]
    assert len(scaled) == 4 * 3
    for names, matrix in scaled:
        expected = torch.cat([stored[name].view(torch.uint8) for name in names])
        torch.testing.assert_close(matrix.codes.view(torch.uint8), expected, rtol=0, atol=0)
    assert 0.9 < cosine(runner, load_runner(config(exact))) < 1 - 1e-5


def test_blocks_are_rounded_again_to_rows_if_it_is_asked_for(tmp_path: Path) -> None:
    folder, exact = store(RILL, tmp_path, *FORMS[0])
    assert load_runner(config(folder, **FP8)).info.quantization == "fp8"
    assert 0.98 < cosine(load_runner(config(folder, **FP8)), load_runner(config(exact))) < 1 - 1e-5


@pytest.mark.parametrize(("how", "section"), FORMS)
def test_experts_in_codes_have_their_values(how: Store, section: dict[str, Any], tmp_path: Path) -> None:
    golden = read_family("qwen3_moe_some_layers")
    write_checkpoint(golden.blueprint, tmp_path / "whole")
    stored, exact = store(tmp_path / "whole", tmp_path, how, section)
    assert any(
        ".experts.0." in name and each.dtype == TYPE for name, each in load_file(stored / "model.safetensors").items()
    )
    found, expected = (continuations(load_runner(config(folder)), golden) for folder in (stored, exact))
    assert found == expected


@pytest.mark.parametrize(("axis", "rows", "columns"), [(-2, slice(32, 64), slice(64)), (-1, slice(64), slice(16, 48))])
def test_a_rank_has_the_codes_and_scales_of_its_part(axis: int, rows: slice, columns: slice, tmp_path: Path) -> None:
    folder, _ = store(LLAMA, tmp_path, *FORMS[1])
    _, source, _ = open_checkpoint(config(folder))
    name, taken = "model.layers.0.self_attn.q_proj.weight", rows if axis == -2 else columns
    part, stored = Part(axis, ((taken.start or 0, taken.stop),), 64), load_file(folder / "model.safetensors")
    expected, expected_scales = stored[name][rows, columns], stored[f"{name}_scale"][rows].float()
    codes, scales = torch.empty(expected.shape, dtype=TYPE), torch.empty(expected_scales.shape)
    assert source.copy_codes(name, codes, scales, part)
    torch.testing.assert_close(codes.view(torch.uint8), expected.contiguous().view(torch.uint8), rtol=0, atol=0)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
    values = torch.empty(expected.shape)
    source.copy(name, values, part)
    torch.testing.assert_close(values, value_of(stored, name)[rows, columns], rtol=0, atol=0)


def test_a_part_in_floats_stays_in_floats(tmp_path: Path) -> None:
    """Projections of one input of which one is not in codes are computed as one matrix in floats."""
    folder, _ = store(LLAMA, tmp_path, *FORMS[1])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = value_of(tensors, name)
    del tensors[f"{name}_scale"]
    save_file(tensors, file)
    assert np.isfinite(rows_of(load_runner(config(folder)))).all()


PROJECTION, EXPERTS = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        pytest.param(
            {f"{PROJECTION}_scale": None},
            ErrorCode.INVALID,
            f"tensor {PROJECTION!r} is stored as F8_E4M3, but there is no {PROJECTION}_scale",
            id="codes without a scale",
        ),
        pytest.param(
            {f"{PROJECTION}_scale": torch.ones(3, 1)},
            ErrorCode.INVALID,
            "k_proj.weight' has shape (32, 64), but its scales have (3, 1); is it damaged?",
            id="scales of another shape",
        ),
        pytest.param(
            {EXPERTS: torch.zeros(4, 32, 16).to(TYPE), f"{EXPERTS}_scale": torch.ones(4, 32, 1)},
            ErrorCode.UNIMPLEMENTED,
            f"tensor {EXPERTS!r} is stored as F8_E4M3 with shape (4, 32, 16); only matrices can be, [rows, columns]",
            id="experts in one tensor",
        ),
    ],
)
def test_codes_that_have_no_values_are_refused(
    changes: dict[str, torch.Tensor | None], code: ErrorCode, words: str, tmp_path: Path
) -> None:
    folder, _ = store(LLAMA, tmp_path, *FORMS[1])
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    error = error_of(load_runner, config(folder))
    assert (error.code, error.param) == (code, "model_path")
    assert words in error.message


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method is gptq"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method is fbgemm_fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size is [64, 64]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format is 'pack-quantized'"),
        ({**COMPRESSED, "config_groups": {"0": {"weights": {**ROWS, "num_bits": 4}}}}, "num_bits is 4"),
        ({**COMPRESSED, "config_groups": {"0": {}}}, "a group's weights are None"),
    ],
    ids=str,
)
def test_other_kinds_are_refused_by_name(section: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = shutil.copytree(LLAMA, tmp_path / "model")
    edit(folder, quantization_config=section)
    error = error_of(load_runner, config(folder))
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "model_path")
    assert f"quantized checkpoints are not supported (this one: in quantization_config {words})" in error.message


def test_openvino_refuses_them_as_before(tmp_path: Path) -> None:
    folder, _ = store(LLAMA, tmp_path, *FORMS[0])
    error = error_of(load_default, config(folder))
    assert (error.code, error.param) == (ErrorCode.UNIMPLEMENTED, "model_path")
    assert error.message == "quantized checkpoints are not supported (this one: fp8); supported: bf16, f16, f32"
