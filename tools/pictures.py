"""Pictures of a trained run for README and docs, taken in a headless Chromium.

    python -m tools.pictures runs/quickstart [--evaluation evaluations/quickstart] [--output docs/images] [--whole]

It takes the run's report, the report of its evaluation (`mempipe evaluate runs/quickstart` writes it) and the page of
`mempipe serve` after one question, each in two widths, light and dark: `report_1280_light.png`, and so on. It starts
the service and ends it, also when this command is killed. `attempt.svg` is the picture of `mempipe trace --svg`.
`--whole` takes the pages to their ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from mempipe.cli import main as mempipe
from mempipe.settings import ConfigError
from tools.browser import CHROMIUM, Page, browsing
from tools.guard import leave_nothing_behind
from tools.processes import Marked, Running, free_ports

HEIGHTS = {1280: 1500, 390: 1800}
"""The most pixels of a page that a picture shows, by the width of the window."""
_WINDOW_HEIGHT = 600  # lower than every page, which would be filled up with background
SCHEMES = ("light", "dark")
_ASK = """[...document.querySelectorAll('#example_list button')]
    .sort((one, other) => other.textContent.length - one.textContent.length)[0].click()"""
_ANSWERED = "!document.getElementById('save').hidden"


def take_pictures(page: Page, urls: dict[str, str], folder: Path, *, whole: bool = False) -> list[Path]:
    """Writes a picture of each address in every width and scheme. `urls` has the addresses by the pictures' names; that
    of `ask` is a service, which is asked the longest of its examples. Raises ConfigError for a page that is wider than
    its window."""
    pictures = []
    for name, url in urls.items():
        for width, height in HEIGHTS.items():
            page.resize(width, _WINDOW_HEIGHT)
            page.open(url)
            if name == "ask":
                page.until("document.querySelector('#example_list button')")
                page.value(_ASK)
                page.until(_ANSWERED)
            drawn = page.value("document.documentElement.scrollWidth")
            if drawn > width:
                raise ConfigError(f"the page {name} is {drawn} pixels wide in a window of {width}")
            for scheme in SCHEMES:
                page.colours(scheme)
                picture = folder / f"{name}_{width}_{scheme}.png"
                page.screenshot(picture, height=None if whole else height)
                pictures.append(picture)
    return pictures


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serves the run on this machine for the block. Yields the address."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mempipe.cli", "serve", str(run.resolve()), "--port", str(port)]
        marked = Marked()
        service = Running(command, marked=marked, cwd=Path(folder))
        try:
            service.wait_until(lambda: _answers(f"{url}/v1/models"), every_s=0.5)
            yield f"{url}/"
        finally:
            service.end()
            marked.end()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--evaluation", type=Path, help="folder of its evaluation; default: evaluations/NAME")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--whole", action="store_true", help="take the pages to their ends")
    arguments = parser.parse_args(words)
    evaluation = arguments.evaluation or Path("evaluations") / arguments.run.resolve().name
    try:
        reports = {"report": arguments.run / "report.html", "evaluation": evaluation / "report.html"}
        for name, file in reports.items():
            if not file.is_file():
                command = "train" if name == "report" else f"evaluate {arguments.run}"
                raise ConfigError(f"{file} does not exist; `mempipe {command}` writes it")
        if CHROMIUM is None:
            raise ConfigError("no Chromium is installed (chromium, chromium-browser or google-chrome)")
        arguments.output.mkdir(parents=True, exist_ok=True)
        leave_nothing_behind()
        urls = {name: file.resolve().as_uri() for name, file in reports.items()}
        with (
            served(arguments.run) as url,
            tempfile.TemporaryDirectory() as profile,
            browsing(Path(profile)) as page,
        ):
            pictures = take_pictures(page, {**urls, "ask": url}, arguments.output, whole=arguments.whole)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, pictures)))
    return mempipe(["trace", str(arguments.run), "--svg", str(arguments.output / "attempt.svg")])


if __name__ == "__main__":
    sys.exit(main())
