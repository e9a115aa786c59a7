"""Code that the console copies: from the clipboard into a process that runs it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from playwright.sync_api import Page

from tests.waiting import PATIENCE_S


def copy_as(page: Page, form: str) -> str:
    """Choose a form in the page's menu `Copy as`, and return what is in the clipboard then."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy as").click()
    page.get_by_role("button", name=form, exact=True).click()
    page.get_by_text(f"Copied as {form}").wait_for()
    page.get_by_role("button", name="Close").last.click()
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def run_copied(form: str, code: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run copied code where its files lie, and return what it prints. Fails where it fails."""
    command = ["bash", "-c", code] if form == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    return done.stdout
