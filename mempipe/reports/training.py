"""The report of a run: `report.json` with flat numbers and `report.html`, one page that needs nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from mempipe.credentials import without_credentials
from mempipe.reports.training_data import ReportData, comparable, read_report_data, summarise
from mempipe.reports.training_page import render_page
from mempipe.storage.files import write_text


def write_report(folder: str | Path, data: ReportData | None = None) -> tuple[Path, Path]:
    """Writes report.html and report.json into the run's folder, each atomically, and returns their paths.

    Without `data` it is read from the folder.
    """
    folder = Path(folder)
    data = data or read_report_data(folder)
    data = comparable(dataclasses.replace(data, settings=without_credentials(data.settings)))
    numbers = summarise(data)
    page, table = folder / "report.html", folder / "report.json"
    write_text(page, render_page(data, numbers))
    write_text(table, json.dumps(numbers, indent=1) + "\n")
    return page, table
