"""How the tests are spread over workers, what their ranks find loaded, and which of them wait for `make test-all`."""

from __future__ import annotations

import os

import pytest

# Before torch is loaded. Threads that wait for one another spin, which costs the other worker its core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also worlds that repeat, in more ranks, what others show")


def pytest_configure() -> None:
    from zerobench import fork_server

    if "tests.preloaded" not in fork_server.PRELOAD:
        fork_server.PRELOAD.append("tests.preloaded")


@pytest.hookimpl(tryfirst=True)  # xdist, which makes a group a part of the name, comes after us
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out thorough tests unless asked for. A worker gets all that need a module's fixture, and makes it once."""
    if not config.getoption("--thorough"):
        left = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left)
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs
        if any(made.scope == "module" for several in fixtures.values() for made in several):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
