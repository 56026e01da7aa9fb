"""Takes the screenshots of pages that the documents show, in a headless Chromium, and compresses them.

    python tools/docs/screenshots.py [SHOT ...]

A *shot* is a page on a screen after a script has run in it. `make setup-browser` installs the browser.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.docs.chromium import LAPTOP, PHONE, Chromium, Screen, chromium
from zerobench.results.options import Parser

HERE = Path(__file__).resolve().parents[2]
SHOWN = HERE / "docs/assets/replay"
POINT = """replay.go(5200); const map = document.querySelectorAll('.map')[3];
const whole = (one) => one.shown && one.classList.contains('c0') && one.spell.bytes > 7e5;
replay.point(map.blocks.find(whole))"""
LARGEST = (
    "const n = document.getElementById('n'); n.value = n.max; n.dispatchEvent(new Event('input')); replay.go(6300)"
)


@dataclass(frozen=True)
class Shot:
    """A picture of `page`, NAME.png beside it, after `script` has run in it."""

    name: str
    page: Path
    screen: Screen
    script: str


STEP = SHOWN / "step.html"
REPORT = HERE / "docs/assets/report/peers.html"
RUNS = "document.getElementById('runs').scrollIntoView()"
TOLD = """document.querySelector('.card').scrollIntoView();
const bars = [...document.querySelectorAll('.bar')].filter((one) => one.textContent.startsWith('zero1'));
bars.at(-1).focus({preventScroll: true})"""
SHOTS = (
    Shot("light", STEP, LAPTOP, "replay.go(6300)"),
    Shot("dark", STEP, replace(LAPTOP, dark=True), POINT),
    Shot("largest", STEP, LAPTOP, f"{LARGEST}; document.getElementById('scale').scrollIntoView()"),
    Shot("phone", STEP, PHONE, "replay.go(6300)"),
    Shot("report", REPORT, replace(LAPTOP, still=True), TOLD),
    Shot("report_dark", REPORT, replace(LAPTOP, dark=True, still=True), RUNS),
    Shot("report_phone", REPORT, replace(PHONE, still=True), "document.querySelector('.figures').scrollIntoView()"),
    Shot("phone_dark", STEP, replace(PHONE, dark=True), "replay.go(4200); scrollTo(0, 330)"),
)


def take(browser: Chromium, shot: Shot) -> Path:
    """Takes one picture and returns its file. Raises ValueError if the page complains, or asks for anything."""
    browser.open(shot.page, shot.screen)
    browser.wait_for("document.body.dataset.ready")
    browser.tell("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.run(shot.script)
    browser.listen()
    if wrong := [*browser.complaints, *browser.requests]:
        raise ValueError(f"{shot.page.name}: {wrong[0]}")
    to = shot.page.with_name(f"{shot.name}.png")
    browser.screenshot(to)
    with Image.open(to) as picture:
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(to, optimize=True)  # no color is off by more than can be seen: they mean something
    return to


def main() -> int:
    """Takes all pictures. Exit code 2 without a browser, or where a page is at fault."""
    parser = Parser("tools/docs/screenshots.py", __doc__)
    names = [shot.name for shot in SHOTS]
    parser.add_argument("shots", nargs="*", metavar="SHOT", help=f"of {', '.join(names)} (default: all)")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.shots if name not in names]:
        parser.error(f"{unknown[0]}: no such shot; use {', '.join(names)}")
    try:
        with chromium() as browser:
            for shot in SHOTS:
                if shot.name in (chosen.shots or names):
                    print(f"screenshot: {take(browser, shot)}")
    except (FileNotFoundError, ValueError) as error:
        print(f"screenshots.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
