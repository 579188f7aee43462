"""Take screenshots of reports and comparisons in Chromium, at 1400 and 390 pixels.

python bench/screenshots.py runs/demo --readme          # docs/images/report.png of the README
python bench/screenshots.py RUN [RUN ...] --output DIR  # all pages: each report, and the comparison of all runs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "browser"))
from devtools import Browser  # noqa: E402

from tunesmith.report.build import (  # noqa: E402
    build_report,
    write_comparison,
    write_report,
)
from tunesmith.report.compare import compare_runs  # noqa: E402

WIDTHS = (1400, 390)
README_HEIGHT = 1600


def shrink(path: Path) -> None:
    """Reduce the number of colors, so that the README loads quickly."""
    from PIL import Image

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(colors=192, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


def take(browser: Browser, page: Path, width: int, picture: Path, height: int | None = None) -> None:
    """Write a screenshot of the whole page, or of its top."""
    browser.look(width=width, height=900)
    browser.open(page.as_uri())
    assert browser.run("document.documentElement.scrollWidth") <= width, f"{page} is wider than {width} pixels"
    browser.look(width=width, height=height or int(browser.run("document.documentElement.scrollHeight")))
    browser.screenshot(picture)
    assert browser.console == [], browser.console
    print(picture)


def main() -> None:
    """Write the pages of the runs with the current code and take screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("screenshots"))
    parser.add_argument("--readme", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pages = [write_report(build_report(run), folder / f"{run.resolve().name}.html") for run in args.runs]
        if len(args.runs) > 1:
            pages.append(write_comparison(compare_runs(args.runs), folder / "compare.html"))
        with Browser(folder / "profile") as browser:
            if args.readme:
                picture = ROOT / "docs" / "images" / "report.png"
                take(browser, pages[0], WIDTHS[0], picture, README_HEIGHT)
                shrink(picture)
                return
            args.output.mkdir(parents=True, exist_ok=True)
            for page in pages:
                for width in WIDTHS:
                    take(browser, page, width, args.output / f"{page.stem}-{width}.png")


if __name__ == "__main__":
    main()
