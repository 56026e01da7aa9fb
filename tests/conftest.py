"""How tests are spread over workers, what their ranks find loaded, which wait for `make test-all`, and registries."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded. OpenMP's threads would spin while they wait, on the core that another test needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("COLUMNS", None)  # tables in tests are as wide as in a file, whatever the terminal that runs them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="also tests marked thorough, and all cases of those marked shown(n)"
    )


def pytest_configure() -> None:
    from zerobench.ranks import fork_server

    if "tests.preloaded" not in fork_server.PRELOAD:
        fork_server.PRELOAD.insert(-1, "tests.preloaded")  # before what freezes all that is there


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out thorough tests unless asked for, and of cases that go the same way all but the first.

    Unit tests without a slow one in their file come last: no worker waits long for another at the end.
    """
    if not config.getoption("--thorough"):
        cases: Counter[str] = Counter()
        waits = {item: _waits(item, cases) for item in items}
        items[:] = [item for item in items if not waits[item]]
        config.hook.pytest_deselected(items=[item for item, one in waits.items() if one])
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path.parent.name == "unit" and item.path not in slow)


def _waits(item: pytest.Item, cases: Counter[str]) -> bool:
    shown = item.get_closest_marker("shown")
    cases[name := item.nodeid.partition("[")[0]] += 1
    return bool(item.get_closest_marker("thorough") or (shown and cases[name] > shown.args[0]))


def pytest_collection_finish() -> None:
    """Has the garbage collector look less often at all that torch and the tests loaded: it took a tenth of the time."""
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def _spares_what_is_loaded() -> None:
    """A watch collects garbage, which takes half a second if it goes through all that torch and the tests loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """For a test that has more to do in `make test-all`, of the same."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """Takes back what a test registers, which would be a choice in every test after it."""
    from zerobench import registry
    from zerobench.strategies.table import _SPECS

    tables: tuple[dict[str, Any], ...] = (registry.MODELS.builders, registry.DATA.builders, _SPECS)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sends tests to workers one by one, and a file with a module's fixture whole, so that this is made once.

    Groups of pytest-xdist would do: those of 3.8 are lost without a word under pytest 9.2, which names tests otherwise.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def stays_whole(file: str) -> bool:
        return 'scope="module"' in Path(config.rootpath, file).read_text()

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if stays_whole(file) else nodeid

    return OneByOne(config, log)
