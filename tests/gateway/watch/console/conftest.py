"""The console in a real browser, over one server of the bundled models for all tests."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.paths import MODELS
from tests.server_process import ServerProcess, running_command
from tests.waiting import PATIENCE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_AXE = files("axe_playwright_python") / "axe.min.js"
expect.set_options(timeout=PATIENCE_S * 1000)


class Console:
    """The console in a tab of its own. `errors` has what the browser's own console complains of."""

    def __init__(self, page: Page, base_url: str) -> None:
        self.page = page
        self.base_url = base_url
        self.errors: list[str] = []
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def show(self, *words: str) -> Page:
        """Open a page of the console by the words of its address, and wait until it is drawn."""
        self.page.goto(f"{self.base_url}/console/#/{'/'.join(words)}")
        expect(self.page.locator("main h1")).to_be_visible()
        return self.page

    def find_barriers(self, *rules: str) -> list[str]:
        """Return what axe finds serious or critical on what is shown now; by some of its rules alone where named."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(_AXE.read_text())
        options: dict[str, Any] = {"resultTypes": ["violations"]}
        if rules:
            options["runOnly"] = list(rules)
        found = self.page.evaluate("options => axe.run(document, options)", options)["violations"]
        return [
            f"{each['id']} at {[node['target'] for node in each['nodes']]}: {each['help']}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def forgive(self, words: str) -> None:
        """Forget the complaints with these words: the test asks for what the browser complains of."""
        self.errors[:] = [each for each in self.errors if words not in each]

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


OpenConsole = Callable[..., Console]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a window. Its event loop is that of this thread, so it ends before another module's tests."""
    path = next((found for each in _NAMES if (found := shutil.which(each))), None)
    if path is None:
        pytest.skip(f"no browser is installed: {', '.join(_NAMES)} (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def console_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled models, which clients may load and unload. Tests leave them loaded."""
    log: Path = tmp_path_factory.mktemp("console") / "log"
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with running_command(log, f"--model-repository={MODELS}", *explicit) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def open_console(browser: Browser) -> Iterator[OpenConsole]:
    """Opens the console of a server, and fails the test where the browser complained of something."""
    with ExitStack() as stack:
        opened: list[Console] = []

        def start(base_url: str, scheme: Literal["light", "dark"] = "light", width: int = 1280) -> Console:
            size = {"width": width, "height": 800}
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            stack.callback(context.close)
            opened.append(Console(context.new_page(), base_url))
            return opened[-1]

        yield start
        complaints = [each for console in opened for each in console.errors]
    assert not complaints


@pytest.fixture
def console(console_server: ServerProcess, open_console: OpenConsole) -> Console:
    """The console of the server that all tests share."""
    return open_console(console_server.base_url)
