"""Take pictures of an HTML report: light, dark, its list of missed rounds, on a phone, and printed.

    python docs/pictures/report.py replay.html --output docs/pictures

It needs `chromium` and `pdftoppm` on the PATH (Debian: `apt-get install chromium poppler-utils`) and Pillow.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
WIDTH, HEIGHT = 1100, 925
PHONE_WIDTH, PHONE_HEIGHT = 390, 844
LIST_HEIGHT = 360
PRINT_DPI = 60
COLOURS = 160
"""Enough for plots and text, and a fraction of the bytes."""
_SCHEMES = {"light": "1", "dark": "0"}
"""Chromium's numbers of `prefers-color-scheme`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pictures")
    arguments = parser.parse_args()
    page = arguments.report.resolve().as_uri()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for scheme, number in _SCHEMES.items():
            picture = arguments.output / f"report-{scheme}.png"
            _screenshot(folder, page, picture, f"--blink-settings=preferredColorScheme={number}")
        _list(folder, page, arguments.output / "report-missed.png")
        _on_a_phone(folder, page, arguments.output / "report-phone.png")
        _printed(folder, page, arguments.output / "report-print.png")


def _screenshot(folder: Path, page: str, picture: Path, *flags: str) -> None:
    size = f"--window-size={WIDTH},{HEIGHT}"
    _chromium(folder, size, f"--screenshot={picture.resolve()}", *flags, page)
    _made_small(Image.open(picture), picture)


def _list(folder: Path, page: str, picture: Path) -> None:
    """The rounds that missed a target, at the place to which `#missed` scrolls."""
    _framed(folder, f"{page}#missed", picture, WIDTH, LIST_HEIGHT)


def _on_a_phone(folder: Path, page: str, picture: Path) -> None:
    _framed(folder, page, picture, PHONE_WIDTH, PHONE_HEIGHT)


def _framed(folder: Path, page: str, picture: Path, width: int, height: int) -> None:
    """A window cannot be as narrow as a phone, and does not scroll, so the page is shown in a frame that does."""
    style = f"border:0;width:{width}px;height:{height}px"
    frame = folder / "frame.html"
    frame.write_text(f"<body style='margin:0'><iframe src='{page}' style='{style}'></iframe>", encoding="utf-8")
    _screenshot(folder, frame.as_uri(), picture, "--blink-settings=preferredColorScheme=1")
    _made_small(Image.open(picture).crop((0, 0, width, height)), picture)


def _printed(folder: Path, page: str, picture: Path) -> None:
    """The first two printed pages, side by side."""
    _chromium(folder, "--no-pdf-header-footer", f"--print-to-pdf={folder / 'report.pdf'}", page)
    pages = ["pdftoppm", "-png", "-r", str(PRINT_DPI), "-l", "2", str(folder / "report.pdf"), str(folder / "page")]
    subprocess.run(pages, check=True)
    images = [Image.open(file) for file in sorted(folder.glob("page-*.png"))]
    sheet = Image.new(
        "RGB", (sum(image.width + 8 for image in images) - 8, max(image.height for image in images)), "grey"
    )
    at = 0
    for image in images:
        sheet.paste(image, (at, 0))
        at += image.width + 8
    _made_small(sheet, picture)


def _made_small(image: Image.Image, picture: Path) -> None:
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def _chromium(folder: Path, *arguments: str) -> None:
    argv = [*CHROMIUM, f"--user-data-dir={folder / 'profile'}", *arguments]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main()
