"""The browser hears what a page does wrong, shows it on several screens, and skips where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import chromium
from tools.docs.chromium import LAPTOP, PHONE, Chromium, Screen

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>a page</title>
<style>body {{ background: white }} @media (prefers-color-scheme: dark) {{ body {{ background: black }} }}</style>
<p id="where">here</p><script>{script}</script></html>"""


def written(folder: Path, script: str = "") -> Path:
    page = folder / "page.html"
    page.write_text(PAGE.format(script=script))
    return page


PLANTED = {
    "an error": ("console.error('a planted error')", "complaints", "a planted error"),
    "an exception": ("throw Error('planted')", "complaints", "planted"),
    "a host": ("fetch('https://example.org/x').catch(() => 0)", "requests", "https://example.org/x"),
    "a file": ("document.write('<img src=other.png>')", "requests", "other.png"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_heard(browser: Chromium, tmp_path: Path, planted: str) -> None:
    script, kind, words = PLANTED[planted]
    browser.open(written(tmp_path, script))
    browser.run("return new Promise((done) => setTimeout(done, 50))")
    browser.listen()
    assert any(words in one for one in getattr(browser, kind))
    browser.complaints, browser.requests = [], []


def test_a_page_is_seen_on_every_screen(browser: Chromium, tmp_path: Path) -> None:
    page = written(tmp_path)
    for screen in (LAPTOP, PHONE, Screen(600, 400, dark=True, still=True)):
        browser.open(page, screen)
        assert browser.run("return [innerWidth, innerHeight]")[0] >= screen.width
        assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") is screen.dark
        assert browser.run("return matchMedia('(prefers-reduced-motion: reduce)').matches") is screen.still
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium.shutil, "which", lambda name: None)
    assert "chromedriver not installed; `make setup-browser`" in chromium.missing()
    with pytest.raises(FileNotFoundError, match="make setup-browser"), chromium.chromium():
        pass
