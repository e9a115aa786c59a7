"""Inference in the playground: forms of small models' metadata, by clicking."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.gateway.api.v2.http.models import all_types, identity, text_repeat
from tests.gateway.front.http.live import LiveServer, live_server
from tests.gateway.watch.console.conftest import Console, OpenConsole
from tests.gateway.watch.console.copied import copy_as, run_copied

SIDE = 20
VALUES = {
    "BOOL": "[true, false]",
    "UINT8": "[0, 255]",
    "INT8": "[-128, 127]",
    "UINT16": "[0, 65535]",
    "INT16": "[-32768, 32767]",
    "UINT32": "[0, 4294967295]",
    "INT32": "[-2147483648, 2147483647]",
    "UINT64": "[0, 18446744073709551615]",
    "INT64": "[-9223372036854775808, 9007199254740993]",
    "FP16": "[0.5, -65504, 0.00006103515625, 5.960464477539063e-8]",
    "BF16": "[1.5, -256, 0.15625]",
    "FP32": "[0.5, -1.25]",
    "FP64": "[0.1, 1e300]",
}


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server of small models beside the stand-in for a language model."""
    with live_server() as running:

        async def add() -> None:
            picture = identity("picture", "TYPE_FP32", f"3, {SIDE}, {SIDE}", max_batch_size=4)
            for model in (all_types(), text_repeat(), picture, identity("texts", "TYPE_STRING", "-1")):
                running.server.plane.repository.add(model)

        running.run(add())
        yield running


@pytest.fixture
def page(open_console: OpenConsole, small: LiveServer) -> Page:
    return open_console(small.url).show("infer")


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    expect(page.get_by_role("button", name="Run")).to_be_visible()


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_text("done", exact=True)).to_be_visible()


def cells(page: Page, output: str) -> list[str]:
    """Return what the table of an output shows, row by row."""
    return page.get_by_role("region", name=output, exact=True).locator("tbody td").all_inner_texts()


def test_every_type_comes_back_as_it_was_typed(page: Page) -> None:
    choose(page, "alltypes")
    page.get_by_role("button", name="Leave out").click()
    page.locator("summary", has_text="Optional inputs").click()
    for name, text in VALUES.items():
        page.get_by_role("button", name=f"IN_{name}", exact=True).click()
        page.get_by_label(f"Value of IN_{name}", exact=True).fill(text)
    run(page)
    for name, text in VALUES.items():
        assert [json.loads(each) for each in cells(page, f"OUT_{name}")] == pytest.approx(json.loads(text)), name
    # Beyond 53 bits, where JSON's numbers are not JavaScript's.
    assert cells(page, "OUT_INT64")[1] == "9007199254740993"


def test_a_value_that_cannot_be_sent_says_why(page: Page) -> None:
    choose(page, "alltypes")
    page.get_by_label("Value of IN_BOOL").fill("[1]")
    expect(page.get_by_text("1 is no element of BOOL.")).to_be_visible()
    expect(page.get_by_role("button", name="Run")).to_be_disabled()
    page.get_by_label("Value of IN_BOOL").fill("[true, false, true]")
    page.get_by_label("Shape of IN_BOOL").fill("2")
    expect(page.get_by_text("The shape has 2 elements, the values are 3.")).to_be_visible()


def test_an_image_becomes_a_tensor_and_a_tensor_an_image(page: Page, tmp_path: Path) -> None:
    choose(page, "picture")
    file = tmp_path / "red.png"
    Image.new("RGB", (40, 30), (255, 0, 51)).save(file)
    page.locator("fieldset input[type=file]").set_input_files(file)
    page.get_by_label("Pixels of INPUT0").select_option("unit")
    expect(page.get_by_text(f"{3 * SIDE * SIDE} elements, [1, 3, {SIDE}, {SIDE}]")).to_be_visible()
    run(page)
    expect(page.get_by_role("img", name=f"OUTPUT0 as a picture of {SIDE} by {SIDE}")).to_be_visible()
    first = cells(page, "OUTPUT0[0, 0]")
    assert {float(each) for each in first} == {1.0}

    # Too many numbers for code: it reads them from files.
    for form in ("curl", "Python (tritonclient HTTP)"):
        code = copy_as(page, form)
        _save_files(page, tmp_path)
        printed = run_copied(form, code, tmp_path)
        if form == "curl":
            answer = (tmp_path / "answer.bin").read_bytes()
            pixels = np.frombuffer(answer[-3 * SIDE * SIDE * 4 :], np.float32).reshape(3, SIDE, SIDE)
            assert pixels[:, 0, 0] == pytest.approx([1.0, 0.0, 0.2])
        else:
            assert "OUTPUT0 [[[[1." in printed


def _save_files(page: Page, folder: Path) -> None:
    """Save the body for curl and the tensor for NumPy."""
    with (
        page.expect_download(lambda each: each.suggested_filename == "request.bin") as body,
        page.expect_download(lambda each: each.suggested_filename == "INPUT0.bin") as tensor,
    ):
        page.get_by_role("button", name="Save the files of the code").click()
    for each in (body.value, tensor.value):
        each.save_as(folder / each.suggested_filename)


def test_files_are_elements_and_images_among_them_are_shown(page: Page, tmp_path: Path) -> None:
    choose(page, "texts")
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, "PNG")
    (tmp_path / "black.png").write_bytes(written.getvalue())
    (tmp_path / "note.txt").write_text("Grüße")
    page.locator("fieldset input[type=file]").set_input_files([tmp_path / "black.png", tmp_path / "note.txt"])
    run(page)
    expect(page.get_by_role("img", name="Element 0")).to_be_visible()
    expect(page.get_by_label("Element 1")).to_have_text("Grüße")


def test_a_decoupled_model_streams(page: Page, tmp_path: Path) -> None:
    choose(page, "text_repeat")
    page.get_by_label("Value of text_input").fill("one two")
    page.locator("summary", has_text="Optional inputs").click()
    page.get_by_role("button", name="max_tokens", exact=True).click()
    page.get_by_label("Value of max_tokens").fill("[3]")
    run(page)
    expect(page.get_by_text("responses: 3")).to_be_visible()
    expect(page.get_by_role("log", name="Responses").locator("code")).to_have_count(3)
    for form in ("curl", "Python (standard library)"):
        printed = run_copied(form, copy_as(page, form), tmp_path)
        assert printed.count("text_output") == 3, form


def test_a_form_of_a_bundled_model_and_its_request_as_code(console: Console, tmp_path: Path) -> None:
    page = console.show("infer")
    choose(page, "sentence_tokenizer")
    page.get_by_label("Value of text").fill("""hello "world", it's""")
    run(page)
    ids = cells(page, "input_ids")
    assert ids[0] == "101" and len(ids) > 4
    page.locator("summary", has_text="Outputs").click()
    page.get_by_role("checkbox", name="input_ids").check()
    assert console.find_barriers() == []
    for form in ("curl", "Python (tritonclient HTTP)", "Python (gRPC)"):
        printed = run_copied(form, copy_as(page, form), tmp_path)
        assert all(each in printed for each in ids), form
