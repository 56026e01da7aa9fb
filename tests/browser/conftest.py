"""A browser for tests of pages: one per worker; after each test there is neither a complaint nor a request."""

from collections.abc import Iterator

import pytest

from tools.docs.chromium import Chromium, chromium, missing


@pytest.fixture(scope="session")
def _browser() -> Iterator[Chromium]:
    if absent := missing():
        pytest.skip(absent)
    with chromium() as started:
        yield started


@pytest.fixture
def browser(_browser: Chromium) -> Iterator[Chromium]:
    """A headless Chromium. The test fails where its page complains on the console, or asks for anything."""
    _browser.complaints, _browser.requests = [], []
    yield _browser
    _browser.listen()
    assert not _browser.complaints, "the page's console"
    assert not _browser.requests, "a page asks for nothing beside itself"
