"""Chat in the playground, by clicking."""

import json
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.gateway.front.http.live import LiveServer
from tests.gateway.watch.console.conftest import Console, OpenConsole
from tests.gateway.watch.console.copied import copy_as, run_copied
from tests.server_process import ServerProcess

QUESTION = "What can you do?"


def send(page: Page, message: str) -> None:
    page.get_by_role("textbox", name="Message").fill(message)
    page.get_by_role("button", name="Send", exact=True).click()


def answer_text(page: Page) -> str:
    """Return the text of the last answer, once it is complete."""
    answer = page.get_by_role("article", name="Answer of").last
    expect(answer.get_by_text("generated tokens")).to_be_visible()
    return answer.locator(".tokens-text, .message-text").last.inner_text()


def test_an_answer_shows_its_tokens_and_its_speed(console: Console) -> None:
    page = console.show("chat")
    page.get_by_label("max_tokens").fill("12")
    send(page, QUESTION)
    text = answer_text(page)
    assert text
    tokens = page.locator(".token")
    assert "".join(tokens.all_inner_texts()) == text
    tokens.nth(2).hover()
    likeliest = page.get_by_role("status").filter(has_text="%").locator("tr.chosen")
    expect(likeliest).to_contain_text(tokens.nth(2).inner_text().strip())
    page.mouse.move(0, 0)
    page.get_by_role("group", name="Answer").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-chosen")).to_have_text(tokens.first.inner_text())
    expect(page.get_by_text("TTFT")).to_be_visible()
    assert console.find_barriers() == []


def test_copied_code_gets_the_same_answer(console: Console, tmp_path: Path) -> None:
    page = console.show("chat")
    page.get_by_label("max_tokens").fill("60")
    page.get_by_label("stop", exact=True).fill('it\'s never said\nnor "this"')
    page.locator("summary", has_text="Structured output").click()
    page.get_by_role("button", name="Insert an example").last.click()
    send(page, """Tell me of "Paris", it's fine.""")
    text = answer_text(page)
    assert json.loads(text).keys() == {"city", "population"}
    for form in ("curl", "Python (openai)", "Python (gRPC)"):
        printed = run_copied(form, copy_as(page, form), tmp_path)
        assert (_streamed_text(printed) if form == "curl" else printed).strip() == text.strip(), form


def _streamed_text(printed: str) -> str:
    chunks = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("data: {")]
    return "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"])


def test_a_called_tool_is_answered_by_hand(console: Console) -> None:
    page = console.show("chat")
    page.locator("summary", has_text="Tools").click()
    page.get_by_role("button", name="Insert an example").first.click()
    page.get_by_label("tool_choice").select_option("required")
    send(page, "What is the weather in Paris?")
    result = page.get_by_label("Result of get_weather")
    expect(result).to_be_visible()
    expect(page.get_by_label("Arguments of get_weather")).to_contain_text('"city"')
    result.fill('{"temperature": 21}')
    page.get_by_label("tool_choice").select_option("none")
    page.get_by_role("button", name="Send the results").click()
    expect(page.get_by_role("article", name="Answer of")).to_have_count(2)
    assert answer_text(page)
    assert console.find_barriers() == []


def test_two_models_answer_and_a_refusal_is_in_the_words_of_the_server(console: Console) -> None:
    page = console.show("chat")
    page.get_by_label("Compare two models").check()
    page.get_by_label("max_tokens").fill("8")
    page.get_by_label("Model 2", exact=True).last.select_option("rill")
    send(page, QUESTION)
    for side in ("Model 1", "Model 2"):
        answer = page.get_by_role("region", name=side).get_by_role("article", name="Answer of rill")
        expect(answer.get_by_text("8 generated tokens")).to_be_visible()
    page.get_by_label("Compare two models").uncheck()
    page.get_by_label("top_p").fill("5")
    send(page, "Hi")
    refusal = page.get_by_role("alert").filter(has_text="top_p must be greater than 0 and at most 1, got 5.0")
    expect(refusal.get_by_text("Field: top_p")).to_be_visible()
    console.forgive("status of 400")


def test_stop_cancels_the_request_in_the_server(open_console: OpenConsole, chat_live: LiveServer) -> None:
    console = open_console(chat_live.url, width=390)
    page = console.show("chat")
    chat_live.runner.script = []
    chat_live.runner.hold_after(4)
    send(page, "Count.")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    chat_live.runner.release()
    chat_live.wait_idle()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_an_image_is_sent_as_a_part_of_the_message(open_console: OpenConsole, chat_live: LiveServer) -> None:
    """The stand-in takes no images, so its capabilities are changed on their way, and its refusal names the part."""
    console = open_console(chat_live.url)
    shown = {"capabilities": ["completion", "vision"], "details": {"family": "llama"}}
    console.page.route("**/api/show", lambda route: route.fulfill(json=shown))
    page = console.show("chat")
    image = {"name": "dot.png", "mimeType": "image/png", "buffer": b"\x89PNG"}
    page.get_by_role("button", name="Image", exact=True).wait_for()
    page.locator(".composer input[type=file]").set_input_files(image)  # type: ignore[arg-type]
    expect(page.get_by_role("img", name="Image 1")).to_be_visible()
    send(page, "What is this?")
    expect(page.get_by_text("Field: messages[0].content[0].image_url")).to_be_visible()
    console.forgive("status of 400")


def test_reasoning_is_folded(open_console: OpenConsole, chat_live: LiveServer) -> None:
    page = open_console(chat_live.url, scheme="dark").show("chat")
    script = "<think>Two and two.</think>Four."
    chat_live.runner.script = [*chat_live.model.tokenizer.encode_words(script, "script")]
    send(page, "What is two and two?")
    expect(page.get_by_text("Four.")).to_be_visible()
    reasoning = page.get_by_text("Two and two.")
    expect(reasoning).to_be_hidden()
    page.locator("summary", has_text="Reasoning").click()
    expect(reasoning).to_be_visible()


def test_the_playground_fits_a_phone_in_the_dark(console_server: ServerProcess, open_console: OpenConsole) -> None:
    console = open_console(console_server.base_url, scheme="dark", width=360)
    for name, shown in (("chat", "Send"), ("rag", "New collection"), ("infer", "Run")):
        page = console.show(name)
        expect(page.get_by_role("button", name=shown, exact=True)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        assert console.find_barriers() == [], name
