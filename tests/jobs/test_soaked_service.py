"""Ten minutes of a service under load: nothing grows, no log outgrows its rotation, and no answer is wrong."""

from __future__ import annotations

import pytest
from miniature import FEW_PROCESSES, train_command

from benchmarks import soak
from tools.processes import Marked, run

pytestmark = pytest.mark.jobs
MINUTES = 10


def test_a_service_under_load_grows_nothing_in_ten_minutes(tmp_path, capsys):
    short = [*FEW_PROCESSES, "num_steps=1", "name=soaked"]
    trained = run(train_command(tmp_path, short), marked=Marked(), cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    failed = soak.main([str(tmp_path / "soaked"), "--hours", str(MINUTES / 60)])
    assert not failed, capsys.readouterr().out
