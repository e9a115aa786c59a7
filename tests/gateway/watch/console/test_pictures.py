"""Pages of the console look as they did: pictures of fixed samples in a real browser, without a server.

Glyphs and edges differ a little from one version of the browser to the next, so a picture may differ in some of its
points. The words are in DejaVu, whose files Debian's Chromium brings with it.
"""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageChops
from playwright.sync_api import Browser, Page, Route, expect

from tests.gateway.watch.console.fixed_sample import NOW, fixed_samples
from tests.paths import DATA

PICTURES = DATA / "console"
MAJOR = 156
"""The version of Chromium that made the pictures."""
MOST_VERSIONS = 4
"""Another one that is further from it may draw otherwise."""
FAR = 64
"""Levels of 255 by which a colour differs for a point to count as another one."""
MOST_SHARE = 0.0005
"""The share of such points from which on a picture is another one. One word that changes has twice as many."""
_STATIC = files("sluice.gateway.watch.console") / "static"
_ORIGIN = "http://console.invalid"
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FONTS = ':root { --font: "DejaVu Sans"; --mono: "DejaVu Sans Mono" }'
_NEVER_ENDING = """
const fetched = window.fetch;
window.fetch = (address, options) => {
  if (!String(address).includes("/v1/admin/live")) return fetched(address, options);
  const events = SAMPLES.map((each) => "event: sample\\ndata: " + JSON.stringify(each) + "\\n\\n");
  const body = new ReadableStream({ start: (stream) => stream.enqueue(new TextEncoder().encode(events.join(""))) });
  return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
};
"""
"""Answers the question for samples with all of them at once, and leaves the stream open."""


def _serve_file(route: Route) -> None:
    name = route.request.url.removeprefix(f"{_ORIGIN}/console/").partition("#")[0] or "index.html"
    file = _STATIC / name
    if not file.is_file():
        route.fulfill(status=404)
        return
    text = file.read_text() + (_FONTS if name.endswith(".css") else "")
    route.fulfill(body=text, content_type=_TYPES[Path(name).suffix])


@pytest.fixture(scope="module")
def drawing_browser(browser: Browser) -> Browser:
    """The browser, where it draws as the one that made the pictures."""
    major = int(browser.version.partition(".")[0])
    if abs(major - MAJOR) > MOST_VERSIONS:
        pytest.skip(f"the pictures are of Chromium {MAJOR}, and this is {major}, which may draw otherwise")
    fc_list = shutil.which("fc-list")
    fonts = "" if fc_list is None else subprocess.run([fc_list], capture_output=True, text=True, check=True).stdout
    if not all(name in fonts for name in ("DejaVuSans.ttf", "DejaVuSansMono.ttf")):
        pytest.skip("the fonts DejaVu Sans and DejaVu Sans Mono are not installed (Debian: fonts-dejavu-core)")
    return browser


def _open_page(browser: Browser, scheme: str, width: int, height: int) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
        timezone_id="UTC",
        locale="en-GB",
        device_scale_factor=1,
    )
    page = context.new_page()
    page.clock.set_fixed_time(NOW * 1000)
    samples = json.dumps([msgspec.to_builtins(each) for each in fixed_samples()])
    page.add_init_script(f"const SAMPLES = {samples};" + _NEVER_ENDING)
    page.route(f"{_ORIGIN}/**", _serve_file)
    return page


@pytest.mark.parametrize(
    ("name", "address", "scheme", "width", "height"),
    [
        ("overview", "overview", "light", 1180, 820),
        ("engines", "engines", "dark", 1180, 900),
        ("engines-phone", "engines", "light", 390, 1200),
        ("log", "log", "light", 900, 420),
    ],
)
def test_a_page_looks_as_it_did(
    drawing_browser: Browser, tmp_path: Path, name: str, address: str, scheme: str, width: int, height: int
) -> None:
    page = _open_page(drawing_browser, scheme, width, height)
    try:
        page.goto(f"{_ORIGIN}/console/#/{address}")
        expect(page.locator("main h1")).to_be_visible()
        page.evaluate("document.fonts.ready")
        page.mouse.move(0, 0)
        seen = tmp_path / f"{name}.png"
        page.screenshot(path=seen, animations="disabled", caret="hide")
    finally:
        page.context.close()
    _compare(PICTURES / seen.name, seen)


def test_a_block_names_the_request_that_has_it(browser: Browser) -> None:
    page = _open_page(browser, "light", 1180, 900)
    try:
        page.goto(f"{_ORIGIN}/console/#/engines")
        blocks = page.get_by_role("img", name="Map of 512 cells, one for each block, by sequence")
        at = {"shared": (0, 0), "owned": (16, 0), "reserved": (4, 11), "free": (10, 12), "cached": (33, 12)}
        words = {
            "shared": "Block 0: shared by several sequences, one is chatcmpl-000",
            "owned": "Block 16: owned by chatcmpl-000, which has 24 blocks, at most 96",
            "reserved": "Block 389: free, and promised to a sequence that runs",
            "free": "Block 430: free",
            "cached": "Block 453: cached: free, with a prefix that may be used again",
        }
        for kind, (column, row) in at.items():
            blocks.hover(position={"x": 12 * column + 4, "y": 12 * row + 4})
            expect(page.get_by_text(words[kind], exact=True)).to_be_visible()
        blocks.click(position={"x": 12 * 16 + 4, "y": 4})
        named = page.get_by_role("group", name="Sequences by their blocks")
        expect(named.get_by_role("button", pressed=True)).to_have_text("cmpl-000 24")
        expect(page.get_by_role("link", name="Its timeline")).to_have_attribute("href", "#/timelines/chatcmpl-000")
        named.get_by_role("button", pressed=True).press("Enter")
        expect(page.get_by_role("link", name="Its timeline")).to_be_hidden()
    finally:
        page.context.close()


def _compare(known: Path, seen: Path) -> None:
    """Fail where the picture is another one. What differs is then drawn beside it."""
    replacing = f"where that is as it should be: cp {seen} {known}"
    assert known.exists(), f"there is no picture yet; {replacing}"
    expected, found = (Image.open(each).convert("RGB") for each in (known, seen))
    assert found.size == expected.size, f"its size is {found.size}, not {expected.size}; {replacing}"
    difference = ImageChops.difference(expected, found)
    points: NDArray[np.uint8] = np.asarray(difference).max(2)
    share = float((points > FAR).mean())
    if share > MOST_SHARE:
        drawn = seen.with_name(f"{seen.stem}-difference.png")
        Image.fromarray(((points > FAR) * 255).astype(np.uint8)).save(drawn)
        pytest.fail(f"{share:.2%} of {known.name} look otherwise, see {drawn}; {replacing}")
