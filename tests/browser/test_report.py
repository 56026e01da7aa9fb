"""The page of a report in a browser: table, figures and accounts by keyboard, on small screens, in print."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.test_status_show_prune import make
from tools.docs.chromium import LAPTOP, PHONE, Chromium, Screen
from zerobench import cli
from zerobench.results.tables import collect, load

STAGES = Path("results/reference/cpu/stages")
WIRE = "//label[.=' wire_bytes']/input"

CONTRAST = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const bright = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const color = numbers(getComputedStyle(one).backgroundColor);
    if (color.length < 4 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const found = [];
for (const one of document.querySelectorAll("body *")) {
  const words = [...one.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
  if (!words.length || !one.getClientRects().length || one.closest("script, style")) continue;
  const style = getComputedStyle(one), svg = one instanceof SVGElement;
  const [a, b] = [bright(numbers(svg ? style.fill : style.color)), bright(behind(one))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found.push([ratio, one.tagName, words[0].data.trim().slice(0, 40)]);
}
return found;
"""
"""Each text that is shown: its contrast by WCAG 2 against the first opaque background behind it."""

UNNAMED = """
const named = (one) => one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.[0]?.textContent.trim();
const reached = [...document.querySelectorAll("a, button, input, summary, [tabindex]")];
return reached.filter((one) => !named(one)).map((one) => one.outerHTML);
"""


def written(to: Path, *arguments: object) -> Path:
    assert cli.run(["report", *map(str, arguments), "--out", str(to)]) == 0
    return to


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed stages, and a run beside them that failed."""
    folder = tmp_path_factory.mktemp("report")
    runs = folder / "runs"
    logs = {"timed/rank0.log": "Traceback\nboom <b>"}
    make(runs, "zero1", logs, status="crash", reason="a rank died", peak_bytes=None, step_s=None)
    collect(load(STAGES), runs / "collected")
    return written(folder / "report.html", runs)


def cells(browser: Chromium) -> list[str]:
    script = "return [...document.querySelectorAll('#runs-table tbody tr')].map((row) => row.cells[0].textContent)"
    found: list[str] = browser.run(script)
    return found


def test_the_table_sorts_filters_and_shows_columns_by_keyboard(browser: Chromium, page: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(page)
    find = browser.driver.find_element
    names, peaks = cells(browser), load(STAGES).runs.sort_values("peak_bytes")
    assert len(names) == 5
    for way, expected in (("ascending", list(peaks["strategy"])), ("descending", list(peaks["strategy"])[::-1])):
        find(By.XPATH, "//th[button='peak MiB']/button").send_keys(Keys.ENTER)
        head = find(By.XPATH, "//th[button='peak MiB']")
        assert head.get_attribute("aria-sort") == way
        assert browser.run("return document.activeElement.textContent") == "peak MiB"
        shown = [name.split()[0] for name in cells(browser)]
        assert {tuple(sorted(pair)) for pair in zip(shown[:4], expected, strict=True) if len(set(pair)) > 1} <= {
            ("zero1", "zero2")
        }  # which are equal
        assert shown[4] == "zero1"  # what has no value is last both ways
    box = find(By.ID, "filter")
    for words, left in (("status=crash", 1), ("zero3", 1), (f"peak_bytes<={int(peaks['peak_bytes'].iloc[0])}", 1),
                        ("status!=crash step_s>0", 4), ("nothing of this name", 0)):  # fmt: skip
        box.clear()
        box.send_keys(words)
        assert find(By.ID, "count").text == f"{left} of 5 runs", words
    box.clear()
    box.send_keys(Keys.BACKSPACE)
    find(By.XPATH, "//summary[.='Columns']").send_keys(Keys.ENTER)
    box = WebDriverWait(browser.driver, 5).until(lambda driver: driver.find_element(By.XPATH, WIRE))
    box.send_keys(Keys.SPACE)
    assert "wire_bytes" in find(By.ID, "runs-table").text
    box.send_keys(Keys.SPACE)
    assert "wire_bytes" not in find(By.ID, "runs-table").text


def test_figures_tell_their_values_and_runs_lead_to_their_accounts(browser: Chromium, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(page, Screen(1280, 800, still=True))
    browser.tell("Emulation.setFocusEmulationEnabled", enabled=True)  # as if its window were in front
    tip = browser.driver.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    row = load(STAGES).runs.set_index("strategy").loc["zero3"]
    bar = next(one for one in browser.driver.find_elements(By.CSS_SELECTOR, ".bar") if "zero3" in one.text)
    browser.run("arguments[0].focus()", bar)
    assert f"({row['peak_bytes']:,} B)" in tip.text
    assert f"optimizer {row['peak_optimizer_bytes'] / 2**20:.1f} MiB ({row['peak_optimizer_bytes']:,} B)" in tip.text
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()
    part = bar.find_element(By.CSS_SELECTOR, "[data-part=optimizer]")
    ActionChains(browser.driver).move_to_element(part).perform()
    assert tip.text.split("\n")[1] == f"optimizer {row['peak_optimizer_bytes'] / 2**20:.1f} MiB " + (
        f"({row['peak_optimizer_bytes']:,} B)"
    )
    browser.driver.find_element(By.PARTIAL_LINK_TEXT, "zero3 gpt_small").click()
    opened = browser.driver.find_element(By.CSS_SELECTOR, "#accounts details[open]")
    assert "Traffic of one step, rank 0" in opened.text
    browser.driver.find_element(By.LINK_TEXT, "Failures (1)").click()
    assert "boom <b>" in browser.driver.find_element(By.ID, "failures").text


def test_it_can_be_read_by_all_on_every_screen(browser: Chromium, page: Path) -> None:
    for screen in (LAPTOP, PHONE, Screen(1280, 800, dark=True), Screen(390, 844, dark=True, touch=True)):
        browser.open(page, screen)
        assert browser.run("return document.documentElement.scrollWidth") <= screen.width
        browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
        texts = browser.run(CONTRAST)
        assert len(texts) > 300
        assert not [one for one in texts if one[0] < 4.5]
        assert browser.run(UNNAMED) == []
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(one - before <= 1 or (before, one) == (2, 4) for before, one in pairwise(levels))
