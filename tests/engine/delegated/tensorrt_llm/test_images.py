"""Prompts with images as the processors of each version of TensorRT-LLM make them."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from PIL import Image

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.folder import read_folder
from sluice.engine.delegated.tensorrt_llm.images import MAX_IMAGES, ImagePrompts
from sluice.engine.delegated.tensorrt_llm.library import load_library
from sluice.engine.delegated.tensorrt_llm.llm import TensorRtLlm, load_llm
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.errors import SluiceError
from tests.stand_ins.model_folders import VOCAB_SIZE, make_seeing_checkpoint
from tests.waiting import until

pytestmark = pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0", "1.4.0"], indirect=True)
SEEN = VOCAB_SIZE
"""The placeholder's token."""
OpenLlm = Callable[..., Any]


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return make_seeing_checkpoint(tmp_path / "seeing")


def picture(width: int = 40, color: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, 40), color).save(file, "PNG")
    return file.getvalue()


def request(*prompt: int, images: tuple[bytes, ...] = (), **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    made = {"request_id": "r", "prompt_token_ids": [*prompt], "sampling": params, "images": [*images]}
    return GenerateRequest(**{**made, **fields})


async def raised(call: Awaitable[Any]) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await call
    return caught.value


async def images_of(llm: Any, model: Path) -> ImagePrompts:
    images = ImagePrompts(llm, load_library(), read_folder(model))
    await images.start()
    return images


async def test_a_model_of_text_has_no_placeholders(stand_in: ModuleType, open_llm: OpenLlm, checkpoint: Path) -> None:
    assert (await images_of(open_llm(stand_in), checkpoint)).placeholders == ()


async def test_each_image_is_its_tokens(stand_in: ModuleType, open_llm: OpenLlm, seeing: Path) -> None:
    images = await images_of(open_llm(stand_in, seeing), seeing)
    assert images.placeholders == ("<|image|>",) * MAX_IMAGES
    made = await images.process(request(9, SEEN, 8, SEEN, images=(picture(), picture(100))))
    assert made.token_ids == [9, *[VOCAB_SIZE + 2] * 4, 8, *[VOCAB_SIZE + 2] * 8]
    assert made.is_told_apart


async def test_a_processor_works_on_one_prompt_at_a_time(stand_in: ModuleType, open_llm: OpenLlm, seeing: Path) -> None:
    images = await images_of(open_llm(stand_in, seeing), seeing)
    asked = [request(9, SEEN, images=(picture(40 + each),)) for each in range(20)]
    works = [asyncio.create_task(images.process(each)) for each in asked]
    await asyncio.sleep(0)
    works[3].cancel()
    made = await asyncio.gather(*works, return_exceptions=True)
    assert [isinstance(each, BaseException) for each in made] == [number == 3 for number in range(20)]


async def test_many_answers_of_one_request_do_not_come_before_another(
    stand_in: ModuleType, open_llm: OpenLlm, seeing: Path
) -> None:
    images = await images_of(open_llm(stand_in, seeing), seeing)
    order: list[str] = []

    async def process(who: str) -> None:
        asked = request(9, SEEN, images=(picture(),))
        await images.process(msgspec.structs.replace(asked, request_id=who))
        order.append(who)

    works = [asyncio.create_task(process(who)) for who in (*["crowd"] * 10, "other", "third")]
    await until(lambda: images._turns._is_taken)
    for each in (works[0], works[2]):  # one that has its turn, and one that waits
        each.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    assert order == ["crowd", "other", "third", *["crowd"] * 7]


@pytest.mark.parametrize(
    ("prompt", "files", "words"),
    [
        ((9,), (picture(),), "placeholder for each of its 1 images"),
        ((9, SEEN), (b"no image",), "cannot identify image file"),
        ((9, SEEN), (picture()[:60],), "messages have images that TensorRT-LLM cannot use"),
    ],
)
async def test_images_that_cannot_be_used_are_the_client_s_fault(
    stand_in: ModuleType, open_llm: OpenLlm, seeing: Path, prompt: tuple[int, ...], files: tuple[bytes, ...], words: str
) -> None:
    images = await images_of(open_llm(stand_in, seeing), seeing)
    error = await raised(images.process(request(*prompt, images=files)))
    assert error.param == "messages" and words in error.message


async def test_a_lack_of_memory_is_not(
    import_stand_in: Callable[..., ModuleType], open_llm: OpenLlm, seeing: Path
) -> None:
    images = await images_of(open_llm(import_stand_in(FAULT="image_memory"), seeing), seeing)
    with pytest.raises(MemoryError):
        await images.process(request(9, SEEN, images=(picture(2000),)))
    assert (await images.process(request(9, SEEN, images=(picture(),)))).is_told_apart


# -- by the adapter


async def adapter(model: Path) -> TensorRtLlm:
    made = await asyncio.to_thread(load_llm, EngineConfig(model_path=str(model)))
    assert isinstance(made, TensorRtLlm)
    await made.start()
    return made


async def test_where_images_are_alike_in_the_cache_no_request_gets_the_blocks_of_another(
    import_stand_in: Callable[..., ModuleType], seeing: Path
) -> None:
    import_stand_in(FAULT="image_hashes")
    llm = await adapter(seeing)
    asked = [request(9, SEEN, images=(picture(40, color),), cache_salt="own") for color in ("red", "blue")]
    salts = [await salt(llm, each) for each in asked]
    assert "own" not in salts and len({*salts}) == 2
    llm.shutdown()


async def test_the_salt_is_the_request_s_where_they_are_told_apart(stand_in: ModuleType, seeing: Path) -> None:
    llm = await adapter(seeing)
    await raised(llm.expand(request(9, images=(picture(),))))  # a faulty prompt must not change that
    assert await salt(llm, request(9, SEEN, images=(picture(),), cache_salt="own")) == "own"
    llm.shutdown()


async def salt(llm: TensorRtLlm, asked: GenerateRequest) -> object:
    expanded = await llm.expand(asked)
    return expanded.prepare(asked).keywords["cache_salt"]


async def test_memory_of_a_prompt_that_is_dropped_is_free(stand_in: ModuleType, seeing: Path) -> None:
    shared = import_module("tensorrt_llm.inputs.multimodal").SHARED
    llm = await adapter(seeing)
    asked = request(9, SEEN, images=(picture(),))
    kept = (await llm.expand(asked)).prepare(asked)
    await llm.expand(asked)
    num_kept = int(stand_in.__version__ != "1.2.1")
    await until(
        lambda: gc.collect() >= 0 and len(shared) == num_kept
    )  # the loop and the thread hold their last results
    async for _ in llm.submit(kept):
        pass
    del kept
    gc.collect()
    assert not shared
    llm.shutdown()


async def test_an_answer_is_generated_anew_where_the_processor_reads_other_tokens_in_it(
    stand_in: ModuleType, seeing: Path
) -> None:
    llm = await adapter(seeing)
    tokenizer = import_module("tensorrt_llm.llmapi.tokenizer").load_tokenizer(None, seeing)
    whole = tokenizer.encode(" hello")
    letters = [tokenizer.encode(each)[0] for each in "hello"]
    for resumed, is_same in ((whole, True), (letters, stand_in.__version__ == "1.4.0")):
        made = await llm.expand(request(9, SEEN, images=(picture(),), resume_token_ids=resumed))
        assert (made.goes_on, len(made.token_ids)) == (is_same, 5), resumed
    llm.shutdown()
