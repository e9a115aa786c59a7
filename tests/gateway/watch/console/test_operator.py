"""The operator's pages in a real browser."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from re import compile as matching

import httpx
import pytest
from playwright.sync_api import Route, expect

from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from tests.gateway.front.http.live import live_server
from tests.gateway.watch.console.conftest import Console, OpenConsole
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

PAGES = ("overview", "engines", "requests", "timelines", "models", "tenants", "log")
KEY = "sesame"
MODEL = "rill"
LONG = {
    "model": MODEL,
    "prompt": "A sluice is",
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


@contextmanager
def open_generations(server: ServerProcess, request_id: str, num: int = 1) -> Iterator[list[str]]:
    """Keep generations open, each begun anew when it ends. Yields what the ends of the streams were."""
    ends: list[str] = []
    is_over = threading.Event()

    def generate() -> None:
        with server.client() as client:
            while not is_over.is_set():
                with client.stream(
                    "POST", "/v1/completions", json=LONG, headers={"x-request-id": request_id}
                ) as answer:
                    lines = [line for line in _until(is_over, answer) if line.startswith("data: ")]
                ends.append(lines[-1] if lines else "")

    threads = [threading.Thread(target=generate) for _ in range(num)]
    for each in threads:
        each.start()
    try:
        yield ends
    finally:
        is_over.set()
        for each in threads:
            each.join(PATIENCE_S)


def _until(is_over: threading.Event, answer: httpx.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        yield line
        if is_over.is_set():
            return


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(console_server: ServerProcess, open_console: OpenConsole, scheme: str) -> None:
    console = open_console(console_server.base_url, scheme)
    rules = () if scheme == "light" else ("color-contrast",)
    with open_generations(console_server, "busy"):
        for name in PAGES:
            console.show(name)
            assert console.find_barriers(*rules) == [], name


def test_tokens_are_seen_to_flow(console_server: ServerProcess, console: Console) -> None:
    page = console.show("overview")
    with open_generations(console_server, "flow", 2):
        generated = page.get_by_role("img", name="Tokens per second: generated")
        expect(generated).to_have_attribute("aria-label", matching(r"generated [1-9]"))
        expect(page.get_by_role("img", name="Time to first token: median")).to_have_attribute(
            "aria-label", matching(r"median [\d.]+ m?s")
        )
        page = console.show("engines", MODEL)
        expect(page.get_by_role("img", name=matching(r"[1-9]\d* owned"))).to_be_visible()
        expect(page.get_by_role("img", name=matching("^Map of"))).to_be_visible()
        holder = page.get_by_role("group", name="Sequences by their blocks").get_by_role("button", name="flow").first
        holder.click()
        expect(page.get_by_role("link", name="Its timeline")).to_have_attribute("href", "#/timelines/flow")
        expect(page.get_by_role("img", name=matching(r"The last [1-9]\d* steps"))).to_be_visible()
        expect(page.get_by_role("progressbar", name="Tokens of flow").first).to_be_visible()


def test_a_request_is_cancelled_by_clicking(console_server: ServerProcess, console: Console) -> None:
    page = console.show("requests")
    with open_generations(console_server, "unwanted") as ends:
        button = page.get_by_role("button", name="Cancel unwanted")
        expect(button).to_be_visible()
        engine = console_server.engine()
        engine.suspend()  # the request that is open stays so until its end is confirmed
        try:
            button.click()
            question = page.get_by_role("dialog")
            expect(question).to_contain_text("unwanted")
            question.get_by_role("button", name="Cancel the request").click()
            expect(page.get_by_role("status").filter(has_text="is cancelled")).to_be_visible()
        finally:
            engine.resume()
        wait_until(lambda: ends, "the stream's end")
    assert "cancelled" in ends[0]


def test_a_session_is_shown_with_the_reason_why_its_prompt_was_computed_again(
    console_server: ServerProcess, console: Console
) -> None:
    with console_server.client() as client:
        for first in ("A sluice", "A lock"):
            body = {"model": MODEL, "prompt": first + " is a gate in a canal" * 20, "max_tokens": 1}
            headers = {"x-session-id": "a session", "x-parent-session-id": "its parent"}
            client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    page = console.show("requests")
    row = page.get_by_role("row").filter(has_text="a session")
    for text in ("of its parent", "the prompt changed at character 0"):
        expect(row).to_contain_text(text)
    assert console.find_barriers() == []


def test_a_timeline_shows_where_the_time_went(console_server: ServerProcess, console: Console) -> None:
    with console_server.client() as client:
        body = {"model": MODEL, "prompt": "A sluice is", "max_tokens": 4, "temperature": 0}
        client.post("/v1/completions", json=body, headers={"x-request-id": "watched"}).raise_for_status()
    page = console.show("timelines")
    page.get_by_role("link", name="watched").first.click()
    spans = page.get_by_role("list", name="Spans of request watched").get_by_role("listitem")
    for name in ("POST /v1/completions", "tokenize", "queue", "prefill", "decode"):
        expect(spans.filter(has_text=name).first).to_be_visible()
    assert console.find_barriers() == []
    page.get_by_role("link", name="All requests").click()
    expect(page.get_by_role("heading", name="Timelines", level=1)).to_be_visible()


def test_a_model_is_unloaded_and_loaded(console: Console) -> None:
    page = console.show("models")
    model = page.locator("section", has=page.get_by_role("heading", name="sentence_tokenizer"))
    model.get_by_role("button", name="Unload").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    expect(model.get_by_text("unavailable").first).to_be_visible()
    model.get_by_role("button", name="Load").click()
    expect(model.get_by_text("ready").first).to_be_visible()


def test_an_engine_that_is_killed_is_seen_to_come_back(console_server: ServerProcess, console: Console) -> None:
    page = console.show("engines", MODEL)
    expect(page.get_by_text("serving")).to_be_visible()
    console_server.engine().kill()
    expect(page.get_by_text("1 restart", exact=True)).to_be_visible()
    expect(page.get_by_text("serving")).to_be_visible()
    console.show("log")
    expect(page.locator(".log li").first).to_be_visible()


def test_an_engine_that_restarts_is_told_so(console_server: ServerProcess, console: Console) -> None:
    with console_server.client() as client:
        sample = client.get("/v1/admin/live", params={"once": "true"}).json()
    for each in sample["engines"]:
        each["state"] = "restarting"
    body = f"event: sample\ndata: {json.dumps(sample)}\n\n"
    console.page.route("**/v1/admin/live*", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    expect(console.show("engines", MODEL).get_by_text("restarting", exact=True)).to_be_visible()


def test_the_keyboard_alone_will_do(console: Console) -> None:
    page = console.show("overview")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("link", name="Requests").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Requests", level=1)).to_be_visible()
    expect(page).to_have_title("Requests · Sluice")
    expect(page.locator("main")).to_be_focused()


def test_a_phone_shows_every_page_without_scrolling_sideways(
    console_server: ServerProcess, open_console: OpenConsole
) -> None:
    console = open_console(console_server.base_url, width=360)
    for name in PAGES:
        page = console.show(name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Engines").click()
    expect(page.get_by_role("heading", name="Engines", level=1)).to_be_visible()


def test_a_chosen_theme_stays(console: Console) -> None:
    page = console.show("overview")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Theme: as the system").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(background)
    page.reload()
    assert page.evaluate(background) == dark != light


def test_a_key_is_asked_for_and_kept_in_the_tab(open_console: OpenConsole) -> None:
    with live_server(ServeConfig(access=AccessOptions(api_key=KEY))) as running:
        console = open_console(running.url)
        page = console.show("overview")
        field = page.get_by_label("API key")
        field.fill("guess")
        field.press("Enter")
        expect(page.get_by_text("does not know this key")).to_be_visible()
        field.fill(KEY)
        field.press("Enter")
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        page.reload()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        assert all("401" in each for each in console.errors)  # the browser's own words for a refused request
        console.errors.clear()
        page.goto("about:blank")  # the server would wait for the stream


def test_a_key_without_the_right_is_told_so(console: Console) -> None:
    error = {"error": {"message": "key 'ci' has no access to the routes of admin", "code": "insufficient_permissions"}}
    console.page.route("**/v1/admin/live*", lambda route: route.fulfill(status=403, json=error))
    page = console.page
    page.goto(f"{console.base_url}/console/")
    expect(page.get_by_text("This key may not see the operator's pages")).to_be_visible()
    expect(page.get_by_text("key 'ci' has no access to the routes of admin")).to_be_visible()
    page.unroute("**/v1/admin/live*")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    console.errors.clear()  # the browser's own words for a refused request


def test_a_server_that_goes_away_and_comes_back(console_server: ServerProcess, console: Console) -> None:
    with console_server.client() as client:
        sample = client.get("/v1/admin/live", params={"once": "true"}).text
    streams = iter([f"event: sample\ndata: {sample}\n\n"])

    def cut(route: Route) -> None:
        """Let the first stream end after a sample, and those after it have no answer."""
        body = next(streams, None)
        route.abort() if body is None else route.fulfill(body=body, content_type="text/event-stream")

    console.page.route("**/v1/admin/live*", cut)
    page = console.show("overview")
    expect(page.get_by_text("The server is away.")).to_be_visible()
    expect(page.get_by_text("What you see is its last sample.")).to_be_visible()
    page.unroute("**/v1/admin/live*")
    page.get_by_role("button", name="Try now").click()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    expect(page.get_by_text("The server is away.")).to_be_hidden()
    console.errors.clear()  # the browser reports each request without an answer


def test_it_works_behind_a_prefix(console_server: ServerProcess, open_console: OpenConsole) -> None:
    console = open_console(f"{console_server.base_url}/some/proxy")
    console.page.route(
        "**/some/proxy/**", lambda route: route.continue_(url=route.request.url.replace("/some/proxy", ""))
    )
    page = console.show("overview")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
