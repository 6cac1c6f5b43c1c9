"""Writers of metrics next to MLflow: TensorBoard, Weights & Biases, and those of a user."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recording_writer import RELEASED

from mempipe.checks.run import check_run
from mempipe.loader import parse_config
from mempipe.settings import ConfigError
from mempipe.tracking import writers
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import read_losses
from mempipe.tracking.tracker import Tracker

ROOT = Path(__file__).parents[2]
SETTINGS = {"name": "a", "algorithm": {"group_size": 5}}


def make_tracker(folder: Path, *names: str, said: list[str] | None = None, **tracking) -> Tracker:
    config = TrackingConfig(writers=list(names), **tracking)
    return Tracker(
        config,
        folder=folder,
        run_name="a",
        run_config=SETTINGS,
        further=config.further_writers,
        tell=[].append if said is None else said.append,
    )


def own(name: str) -> str:
    return f"recording_writer:{name}"


def calls(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def log(tracker: Tracker, *steps: int, scale: float = 0.1) -> None:
    for step in steps:
        tracker.log_metrics({"em": scale * step}, step=step)


def test_a_writer_of_the_users_own_gets_every_row_in_order(tmp_path):
    tracker = make_tracker(tmp_path, own("Recording"))
    log(tracker, 1, 2)
    assert tracker.flush()
    log(tracker, 3)
    assert tracker.finish("KILLED").losses == ()
    resumed = make_tracker(tmp_path, own("Recording"))
    resumed.restart_at(2)
    log(resumed, 3)
    resumed.finish()
    assert calls(tmp_path) == [
        ["open", "a", 5],
        ["log", 1, {"em": 0.1}],
        ["log", 2, {"em": 0.2}],
        ["log", 3, {"em": pytest.approx(0.3)}],
        ["close", "KILLED"],
        ["open", "a", 5],
        ["restart", 2],
        ["log", 3, {"em": pytest.approx(0.3)}],
        ["close", "FINISHED"],
    ]
    assert not (tmp_path.parent / "mlflow.db").exists(), "mlflow is not among the writers"


def test_a_new_writer_of_a_resumed_run_gets_the_steps_before_first(tmp_path):
    earlier = make_tracker(tmp_path)
    log(earlier, 1, 2)
    earlier.finish()
    time.sleep(0.01)  # rows of this start have another time
    tracker = make_tracker(tmp_path, own("Recording"))
    log(tracker, 3)
    tracker.finish()
    assert [call[1] for call in calls(tmp_path) if call[0] == "log"] == [1, 2, 3]


def test_a_writer_that_is_away_for_a_while_writes_each_row_once(tmp_path):
    said: list[str] = []
    tracker = make_tracker(tmp_path, own("Flaky"), said=said)
    tracker.restart_at(0)
    log(tracker, 1, 2, 3)
    assert tracker.finish().losses == ()
    assert [call[0] for call in calls(tmp_path)] == ["open", "restart", "log", "log", "log", "close"]
    assert said[0] == (
        f"writer {own('Flaky')} does not take entries; they are tried again while the work continues: OSError: the "
        "disk is away"
    )


def test_a_row_that_a_writer_refuses_costs_only_itself(tmp_path):
    said: list[str] = []
    tracker = make_tracker(tmp_path, own("Picky"), said=said)
    log(tracker, 1, 2, 3)
    assert tracker.finish().num_refused == 1
    assert [call[1] for call in calls(tmp_path) if call[0] == "log"] == [1, 3]
    assert said[0] == f"writer {own('Picky')} refuses an entry: ValueError: no step 2 here"
    assert read_losses(tmp_path) == [f"writer {own('Picky')} refused 1 entries; the first: ValueError: no step 2 here"]


def test_a_writer_that_hangs_or_cannot_start_holds_nothing_up(tmp_path):
    RELEASED.clear()
    said: list[str] = []
    tracker = make_tracker(tmp_path, own("Stuck"), own("Broken"), own("Recording"), said=said)
    started = time.monotonic()
    log(tracker, 1, 2)
    assert time.monotonic() - started < 10
    assert not tracker.flush(0.2)
    record = tmp_path / "calls.jsonl"
    while not record.exists() or record.read_text().count("\n") < 3:  # the third writer has what it needs
        assert time.monotonic() - started < 60
        time.sleep(0.005)
    losses = tracker.finish(timeout_s=1.0).losses
    RELEASED.set()
    assert time.monotonic() - started < 60
    assert losses[0] == f"writer {own('Stuck')} lacks 2 rows of metrics: it did not take them in time"
    assert losses[1] == f"writer {own('Broken')} lacks 2 rows of metrics: KeyError: 'no such account'"
    assert [call[0] for call in calls(tmp_path)] == ["open", "log", "log", "close"], "the others are not disturbed"


def test_what_names_no_writer_is_refused(tmp_path, monkeypatch):
    config = {"name": "a", "output": str(tmp_path), "num_steps": 3}
    with pytest.raises(ConfigError, match=r"names .tensorbord.; choose from mlflow, tensorboard, wandb"):
        parse_config(config | {"tracking": {"writers": ["tensorbord"]}})
    with pytest.raises(ConfigError, match="name each writer once"):
        parse_config(config | {"tracking": {"writers": ["mlflow", "mlflow"]}})
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    names = ["mlflow", "wandb", "json:dumps", "nowhere:Writer", own("Recording")]
    tracking = {"writers": names, "profile_steps": [3, 4]}
    found = [f for f in check_run(parse_config(config | {"tracking": tracking})) if "tracking" in f.text]
    assert [(finding.level, finding.text) for finding in found] == [
        ("fatal", "tracking.writers names wandb, whose package is not installed; pip install 'mempipe[wandb]'"),
        (
            "fatal",
            "tracking.writers names json:dumps, which is not a subclass of "
            "mempipe.tracking.metrics_writer.MetricsWriter",
        ),
        (
            "fatal",
            "tracking.writers is 'nowhere', which cannot be imported; is it installed, or in the folder that you start "
            "from?",
        ),
        ("ok", f"tracking.writers: {own('Recording')}"),
        ("note", "tracking.profile_steps names [4], but num_steps is 3"),
    ]
    off = parse_config(config | {"tracking": {"writers": names, "enabled": False}})
    assert off.tracking.further_writers == [] and not off.tracking.uses_mlflow


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader shows of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    tracker = make_tracker(tmp_path, "tensorboard")
    log(tracker, 1, 2, 3, 4)
    tracker.log_metrics({"validation/em": math.nan, "not measured": None}, step=2)
    assert tracker.finish("KILLED").losses == ()
    (first,) = (tmp_path / "tensorboard").iterdir()
    resumed = make_tracker(tmp_path, "tensorboard")
    resumed.restart_at(2)
    log(resumed, 3, scale=1.0)
    resumed.restart_at(2)  # a lost role: another attempt of the same process
    log(resumed, 3, 4, 5, scale=2.0)
    assert resumed.finish().losses == ()
    shown = read_tensorboard(tmp_path)
    assert [step for step, _ in shown["em"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in shown["em"]] == pytest.approx([0.1, 0.2, 6.0, 8.0, 10.0])
    assert [step for step, _ in shown["validation/em"]] == [2] and math.isnan(shown["validation/em"][0][1])
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2 and first.exists()


def test_tensorboard_gets_the_steps_before_also_when_its_first_file_cannot_be_begun(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from mempipe.tracking import tensorboard_writer

    earlier = make_tracker(tmp_path)
    log(earlier, 1, 2)
    earlier.finish()
    time.sleep(0.01)  # rows of this start have another time
    append, faults = tensorboard_writer.TensorBoardWriter._append, [OSError(28, "No space left on device")]

    def full(self, event) -> None:
        if faults:
            raise faults.pop()
        append(self, event)

    monkeypatch.setattr(tensorboard_writer.TensorBoardWriter, "_append", full)
    tracker = make_tracker(tmp_path, "tensorboard")
    log(tracker, 3)
    assert tracker.finish().losses == ()
    assert [step for step, _ in read_tensorboard(tmp_path)["em"]] == [1, 2, 3]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_an_event_that_the_disk_took_in_part_is_overwritten(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    tracker = make_tracker(tmp_path, "tensorboard")
    log(tracker, 1)
    assert tracker.flush()
    (file,) = (tmp_path / "tensorboard").iterdir()
    with file.open("ab") as torn:
        torn.write(b"\x18" + b"\x00" * 200)
    log(tracker, 2)
    assert tracker.finish().losses == ()
    assert [step for step, _ in read_tensorboard(tmp_path)["em"]] == [1, 2]


OFFLINE = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_metrics_writers import make_tracker, log
folder = Path({folder!r})
tracker = make_tracker(folder, "wandb")
log(tracker, 1, 2, 3, 4)
assert tracker.finish("KILLED").losses == (), tracker.losses()
resumed = make_tracker(folder, "wandb")
resumed.restart_at(2)
resumed.log_metrics({{"validation/em": 0.5}}, step=2)
log(resumed, 3, 4, 5, scale=2.0)
resumed.restart_at(3)
resumed.log_metrics({{"em": 100.0, "late": 1.0}}, step=5)
assert resumed.finish().losses == (), resumed.losses()
"""


ONLINE = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_metrics_writers import make_tracker, log
tracker = make_tracker(Path({folder!r}), "wandb")
log(tracker, 1, 2)
tracker.flush(30)
print(*tracker.finish(timeout_s=5).losses)
"""


def read_wandb(file: Path) -> tuple[str, list[dict[str, float]]]:
    """The id of the run and the rows of metrics in a file that W&B wrote offline: records in blocks as LevelDB's log
    has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, partial, run_id, rows = file.read_bytes(), 7, b"", "", []
    while place + 7 <= len(data):
        if (rest := -place % 32768) and rest < 7:
            place += rest
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        partial += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(partial)
            partial = b""
            run_id = record.run.run_id or run_id
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return run_id, rows


def with_wandb(code: str, folder: Path, **variables: str) -> str:
    """What a script prints that has W&B and none of its settings; `folder` is empty, and no login is there."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("the extra `wandb` is not installed")
    code = code.format(tests=str(Path(__file__).parent), folder=str(folder))
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"PYTHONPATH": str(ROOT), "HOME": str(folder.parent)} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.slow  # two starts of W&B's own process
def test_wandb_gets_each_step_once_and_asks_for_no_network(tmp_path):
    assert with_wandb(OFFLINE, tmp_path / "run") == ""
    starts = [read_wandb(file) for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))]
    (first, of_first), (second, of_second) = sorted(starts, key=lambda start: start[1][0]["step"])
    assert first == second == json.loads((tmp_path / "run" / "wandb_run.json").read_text())["id"]
    assert of_first == [{"em": pytest.approx(0.1 * step), "step": step} for step in (1, 2, 3, 4)]
    assert of_second == [{"validation/em": 0.5, "step": 2}, {"em": 10.0, "step": 5}, {"late": 1.0, "step": 5}]


@pytest.mark.slow  # the import of W&B
def test_wandb_without_a_login_asks_nothing_and_is_a_missing_record(tmp_path):
    said = with_wandb(ONLINE, tmp_path / "run", WANDB_MODE="online")
    assert said.startswith("writer wandb lacks 2 rows of metrics: UsageError: No API key configured")
