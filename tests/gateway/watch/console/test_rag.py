"""Answers from documents in the playground, by clicking and by dropping a file."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.watch.console.conftest import Console
from tests.gateway.watch.console.copied import copy_as, run_copied
from tests.server_process import ServerProcess

COLLECTION = "playground"
TEXT = "# Pumps\n\nThe red pump must be greased every Monday – always.\n"
QUESTION = "How often must the red pump be greased?"


@pytest.fixture
def collection(console_server: ServerProcess) -> Iterator[str]:
    """A collection that is not there yet, and is deleted afterwards."""
    yield COLLECTION
    with console_server.client() as client:
        client.delete(f"/v1/rag/collections/{COLLECTION}")


def drop(page: Page, name: str, text: str) -> None:
    """Drop a file of text where files are dropped."""
    made = page.evaluate_handle(
        "([name, text]) => { const data = new DataTransfer(); data.items.add(new File([text], name)); return data; }",
        [name, text],
    )
    page.locator(".drop").dispatch_event("drop", {"dataTransfer": made})


def test_a_dropped_file_is_what_answers_rest_on(console: Console, collection: str, tmp_path: Path) -> None:
    page = console.show("rag")
    page.get_by_role("button", name="New collection").click()
    page.get_by_label("Name").fill(collection)
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_label("Collection", exact=True)).to_have_value(collection)
    drop(page, "pumps.md", TEXT)
    expect(page.get_by_role("list", name="Uploads").get_by_text("created")).to_be_visible()
    expect(page.get_by_role("cell", name="pumps.md").first).to_be_visible()

    page.get_by_role("textbox", name="Question").fill(QUESTION)
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name=f"Answer to {QUESTION}")
    expect(answer.get_by_text("generated tokens")).to_be_visible()
    answer.get_by_role("button", name="Source 1").first.click()
    source = answer.get_by_role("list", name="Sources").get_by_role("listitem").first
    expect(source).to_have_class("source source-marked")
    expect(source.get_by_label("Chunk of pumps.md")).to_contain_text("greased every Monday")
    assert console.find_barriers() == []
    source.get_by_role("button", name="Show it in the document").click()
    expect(page.get_by_role("dialog").locator("mark")).to_contain_text("greased every Monday – always.")
    page.keyboard.press("Escape")
    _check_copied(page, tmp_path)
    _delete(page)


def _check_copied(page: Page, folder: Path) -> None:
    """Check that the copied code, in every form, finds the document and gets an answer that quotes it."""
    for form in ("curl", "Python (openai)", "Python (gRPC)"):
        printed = run_copied(form, copy_as(page, form), folder)
        assert "pumps.md" in printed, form
        if form == "curl":
            events = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
            printed = "".join(each.get("text", "") for each in events)
        assert "Monday" in printed, form


def _delete(page: Page) -> None:
    page.get_by_role("button", name="Delete pumps.md").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No documents are listed.")).to_be_visible()
    page.get_by_role("button", name="Delete the collection").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text(f"Collection {COLLECTION} is deleted.")).to_be_visible()


def test_a_file_that_cannot_be_read_says_why(console: Console, collection: str) -> None:
    page = console.show("rag")
    page.get_by_role("button", name="New collection").click()
    page.get_by_label("Name").fill(collection)
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_label("Collection", exact=True)).to_have_value(collection)
    drop(page, "broken.pdf", "no pdf")
    expect(page.get_by_text("the document is no PDF, or a broken or truncated one")).to_be_visible()
    console.forgive("status of 400")
