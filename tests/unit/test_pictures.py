"""The pictures of README and docs, of a small run's report and of a service with a scripted policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_builders import QUESTIONS, build_service, running
from trace_builders import group, write_run

from mempipe.answers.api import CorpusReply, ExampleReply
from mempipe.data.trajectories import write_trajectories
from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.reports.training import write_report
from mempipe.settings import ConfigError
from tools.browser import CHROMIUM, browsing
from tools.pictures import HEIGHTS, SCHEMES, main, take_pictures

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
EXAMPLE = ExampleReply(
    question=QUESTIONS[0].text, golden_answers=QUESTIONS[0].golden_answers, partition=QUESTIONS[0].partition
)


def report(folder: Path) -> Path:
    folder.mkdir()
    write_run(folder)
    (folder / "state.json").write_text(json.dumps({"seconds": {}, "num_steps": 2, "finished": True}))
    for label, right in (("before", False), ("after", True)):
        groups = [group(label, number, right=right) for number in range(3)]
        write_trajectories(folder / "evaluation" / f"{label}.parquet", groups)
    return next(path for path in write_report(folder) if path.suffix == ".html")


def size(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.mark.slow
@in_a_browser
def test_pages_are_taken_in_both_widths_and_schemes(tmp_path):
    build_tokenizer(tmp_path)
    searched = CorpusReply(partition=QUESTIONS[0].partition, partitions=[], examples=[EXAMPLE])
    service = build_service(load_tokenizer(str(tmp_path)), tmp_path, searched=searched)
    images = tmp_path / "images"
    images.mkdir()
    with running(service), browsing(tmp_path / "profile") as page:
        urls = {"report": report(tmp_path / "run").as_uri(), "ask": f"{service.url}/"}
        taken = take_pictures(page, urls, images)
        assert page.value("document.getElementById('text_answer').textContent") == QUESTIONS[0].golden_answers[0]
    names = [f"{name}_{width}_{scheme}.png" for name in urls for width in HEIGHTS for scheme in SCHEMES]
    assert [picture.name for picture in taken] == names
    for picture in taken:
        width, height = size(picture)
        assert width == int(picture.name.split("_")[1]) and 600 < height <= HEIGHTS[width]
    assert len({picture.read_bytes() for picture in taken}) == len(taken), "light and dark differ"


@in_a_browser
def test_a_page_that_is_wider_than_its_window_is_refused(tmp_path):
    (tmp_path / "wide.html").write_text("<div style='width: 700px'>wide</div>")
    with browsing(tmp_path / "profile") as page, pytest.raises(ConfigError, match=r"wide is 7.. pixels .* of 390"):
        take_pictures(page, {"wide": (tmp_path / "wide.html").as_uri()}, tmp_path)


def test_reports_that_are_missing_are_named_with_their_command(tmp_path, capsys):
    assert main([str(tmp_path / "run")]) == 2
    assert f"{tmp_path}/run/report.html does not exist; `mempipe train` writes it" in capsys.readouterr().err
    report(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--evaluation", str(tmp_path / "measured")]) == 2
    said = capsys.readouterr().err
    assert f"measured/report.html does not exist; `mempipe evaluate {tmp_path}/run` writes it" in said
