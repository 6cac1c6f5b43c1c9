"""The record of a run, against real MLflow stores and real bad servers."""

import json
import logging
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from mempipe.agents.registry import agent_spec
from mempipe.config import RunConfig
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.losses import read_losses
from mempipe.tracking.mlflow_database import database_file
from mempipe.tracking.mlflow_writer import MlflowRun
from mempipe.tracking.traces import Wording, sample_groups
from mempipe.tracking.tracker import Tracker, last_run_id, read_metrics, tracking_uri
from mempipe.types import Context, EndReason, Group, Passage, Question, Search, Trajectory
from tools.processes import free_ports

pytestmark = pytest.mark.slow  # MLflow and its stores

PROMPT_IDS = [1, 2, 3]
AT_ONCE_S = 4.0
"""Less than any wait for a store or a server, and more than a busy machine needs for the call itself."""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """A sqlite store whose tables exist: making them takes longer than most tests."""
    folder = tmp_path_factory.mktemp("store")
    make_tracker(folder / "a", config=TrackingConfig(experiment="other")).finish()
    return folder / "mlflow.db"


@pytest.fixture(autouse=True)
def default_store(monkeypatch, tmp_path, empty_store):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it, and the next test file must not see that
    shutil.copy(empty_store, tmp_path / "mlflow.db")


def make_group(name: str, num_members: int = 2) -> Group:
    search = Search(
        query="Film director",
        num_passages=2,
        passages=[Passage(id="film", title="Film", text="By Ann.")],
        snapshot="s1",
    )
    contexts = [
        Context(
            index=index,
            token_ids=[*PROMPT_IDS, 7, 8, 9],
            loss_mask=[0, 0, 0, 1, 1, 0],
            logprobs=[0.0] * 6,
            policy_versions=[-1, -1, -1, 4, 4, -1],
            num_prompt_tokens=3,
            num_question_tokens=1,
            num_memory_tokens=index,
            action="<think>need director</think><tool_call>{}</tool_call>",
            searches=[search],
            memory_before="old" if index else "",
            memory_after="new",
            generate_seconds=0.5,
            search_seconds=0.25,
        )
        for index in range(2)
    ]
    trajectories = [
        Trajectory(
            id=f"{name}/{n}",
            group_id=name,
            member=n,
            contexts=contexts,
            end_reason=EndReason.ANSWERED,
            answer="Ann",
            reward=0.5,
        )
        for n in range(num_members)
    ]
    return Group(
        id=name, question=Question(id=name, text=f"Who made {name}?", golden_answers=["Ann"]), trajectories=trajectories
    )


def make_tracker(folder: Path, *, config: TrackingConfig | None = None, **changes) -> Tracker:
    run_config = {"name": "a", "algorithm": {"group_size": 5, "dual_clip": None}, "long": "x" * 500}
    return Tracker(
        config or TrackingConfig(), **({"folder": folder, "run_name": "a", "run_config": run_config} | changes)
    )


def client_of(folder: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri(TrackingConfig(), folder))


@contextmanager
def server(answer):
    """A real HTTP server on a free port; `answer(handler)` deals with every request."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            answer(self)

        do_POST = do_PATCH = do_GET

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_parameters_config_metrics_and_files_arrive(tmp_path):
    folder = tmp_path / "new" / "a"
    tracker = make_tracker(folder)
    for step in range(3):
        tracker.log_metrics({"reward": np.float32(step / 2), "seconds/rollout": 3, "em": None}, step=float(step))
    (folder / "report.json").write_text("{}")
    tracker.log_artifact(folder / "report.json")
    summary = tracker.finish()
    assert (summary.num_failed_calls, summary.num_refused, summary.num_unwritten) == (0, 0, 0)
    assert summary.run_id == last_run_id(folder)

    client = client_of(folder)
    run = client.get_run(summary.run_id)
    assert run.info.run_name == "a" and run.info.status == "FINISHED"
    assert run.data.params == {"name": "a", "algorithm.group_size": "5", "algorithm.dual_clip": "None"}
    assert [(m.step, m.value) for m in client.get_metric_history(summary.run_id, "reward")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    assert run.data.metrics["seconds/rollout"] == 3.0 and "em" not in run.data.metrics
    assert {file.path for file in client.list_artifacts(summary.run_id)} == {"config.yaml", "report.json"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["a", "mlartifacts", "mlflow.db"]


def test_a_trajectory_is_a_trace_with_one_span_per_turn(tmp_path):
    import mlflow

    tracker = make_tracker(
        tmp_path / "a",
        config=TrackingConfig(traces_per_step=2),
        wording=Wording(decode=lambda ids: f"text of {list(ids)}", thought=agent_spec("memsearcher").thought),
    )
    tracker.log_trajectories([make_group(f"film{n}") for n in range(5)], step=7)
    summary = tracker.finish()
    assert summary.num_refused == 0
    mlflow.set_tracking_uri(tracking_uri(TrackingConfig(), tmp_path / "a"))
    experiment = client_of(tmp_path / "a").get_experiment_by_name("mempipe").experiment_id
    traces = mlflow.search_traces(locations=[experiment], run_id=summary.run_id, return_type="list")
    assert len(traces) == 2

    root, *turns = traces[0].data.spans
    assert root.parent_id is None and [turn.parent_id for turn in turns] == [root.span_id] * 2
    assert root.inputs["golden_answers"] == ["Ann"] and root.inputs["question"].startswith("Who made film")
    assert (
        root.outputs["answer"] == "Ann" and root.outputs["reward"] == 0.5 and root.outputs["end_reason"] == "answered"
    )
    assert [turn.name for turn in turns] == ["turn 0", "turn 1"]
    assert turns[1].inputs["memory"] == "old" and turns[1].inputs["prompt"] == f"text of {PROMPT_IDS}"
    assert turns[0].outputs["passages"][0]["text"] == "By Ann." and turns[0].outputs["memory"] == "new"
    assert turns[0].outputs["calls"] == [{"query": "Film director", "num_passages": 2, "snapshot": "s1"}]
    assert turns[0].attributes["thought"] == "need director"
    assert turns[0].attributes["sampled_tokens"] == 2 and turns[0].attributes["policy_versions"] == [4]
    assert turns[0].end_time_ns - turns[0].start_time_ns == 750_000_000
    assert turns[1].start_time_ns == turns[0].end_time_ns and turns[1].end_time_ns == root.end_time_ns
    assert traces[0].info.tags["step"] == "7"


def test_no_more_traces_than_asked_for_and_of_different_questions():
    groups = [make_group(f"q{n}") for n in range(6)]
    sample = sample_groups(groups, num_trajectories=4, seed=3)
    assert [len(group.trajectories) for group in sample] == [1, 1, 1, 1]
    assert len({group.id for group in sample}) == 4
    assert (
        sample == sample_groups(groups, num_trajectories=4, seed=3) != sample_groups(groups, num_trajectories=4, seed=4)
    )
    assert len(sample_groups(groups, num_trajectories=9, seed=0)) == 6
    assert sample_groups([make_group("q", num_members=0)], num_trajectories=1, seed=0) == []


def test_numbers_that_are_not_finite_survive(tmp_path):
    tracker = make_tracker(tmp_path / "a")
    tracker.log_metrics({"kl": math.nan, "ratio": math.inf}, step=0)
    summary = tracker.finish()
    assert summary.num_refused == 0
    assert math.isnan(client_of(tmp_path / "a").get_run(summary.run_id).data.metrics["kl"])
    line = json.loads((tmp_path / "a" / "metrics.jsonl").read_text())
    assert line["kl"] is None and line["ratio"] is None
    (row,) = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert math.isnan(row["kl"])


def test_what_is_no_number_is_refused_with_its_name(tmp_path):
    tracker = make_tracker(tmp_path / "a", config=TrackingConfig(enabled=False))
    with pytest.raises(ValueError, match="metric em is 'high'"):
        tracker.log_metrics({"em": "high"}, step=0)
    with pytest.raises(ValueError, match="'step' is taken"):
        tracker.log_metrics({"step": 1.0}, step=0)


def test_more_metrics_than_one_call_holds(tmp_path):
    tracker = make_tracker(tmp_path / "a")
    for step in range(30):
        tracker.log_metrics({f"m{n}": n for n in range(100)}, step=step)
    summary = tracker.finish()
    assert summary.num_refused == summary.num_unwritten == 0
    client = client_of(tmp_path / "a")
    assert len(client.get_run(summary.run_id).data.metrics) == 100
    assert len(client.get_metric_history(summary.run_id, "m99")) == 30


def test_names_that_mlflow_does_not_know_are_rewritten(tmp_path):
    stages = {"stages": {"memory + search": {"config": "memory.yaml"}}}  # of a chain, whose names are the user's
    tracker = make_tracker(tmp_path / "a", run_config=stages)
    tracker.log_metrics({"em@2 hops": 1.0, "measure//rule/": 0.5, "measure/../b": 0.0}, step=0)
    summary = tracker.finish()
    data = client_of(tmp_path / "a").get_run(summary.run_id).data
    assert data.metrics == {"em_2 hops": 1.0, "measure/rule": 0.5, "measure/b": 0.0} and data.params == {
        "stages.memory _ search.config": "memory.yaml"
    }
    assert read_metrics(tmp_path / "a" / "metrics.jsonl")[0]["em@2 hops"] == 1.0


def test_a_resumed_run_continues_the_same_mlflow_run(tmp_path):
    folder = tmp_path / "a"
    first = make_tracker(folder)
    first.log_metrics({"em": 0.1}, step=0)
    run_id = first.finish("FAILED").run_id
    assert client_of(folder).get_run(run_id).info.status == "FAILED"
    second = make_tracker(folder, run_config={"name": "b"}, resume_run_id=last_run_id(folder))
    second.log_metrics({"em": 0.2}, step=1)
    assert second.run_id(30) == run_id
    summary = second.finish()
    assert (summary.run_id, summary.num_refused) == (run_id, 0)
    client = client_of(folder)
    assert [m.value for m in client.get_metric_history(run_id, "em")] == [0.1, 0.2]
    assert client.get_run(run_id).info.status == "FINISHED" and client.get_run(run_id).data.params["name"] == "a"
    assert len([f for f in client.list_artifacts(run_id) if f.path.startswith("config")]) == 2
    assert [row["em"] for row in read_metrics(folder / "metrics.jsonl")] == [0.1, 0.2]


@pytest.mark.parametrize("unknown", [b"0" * 32, b"not an id", b"\xff\x00\n"])
def test_resuming_an_unknown_run_starts_a_new_one(tmp_path, unknown):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "mlflow_run_id").write_bytes(unknown)
    summary = make_tracker(folder, resume_run_id=last_run_id(folder)).finish()
    assert summary.num_unwritten == 0 and summary.run_id == last_run_id(folder) not in (None, unknown.decode("latin1"))


def test_without_mlflow_the_metrics_are_still_written(tmp_path):
    tracker = make_tracker(tmp_path / "a", config=TrackingConfig(enabled=False))
    tracker.log_metrics({"em": 0.5}, step=0)
    tracker.log_trajectories([make_group("q")], step=0)
    tracker.log_artifact(tmp_path / "nothing")
    assert tracker.run_id(5) is None and tracker.finish().run_id is None
    assert read_metrics(tmp_path / "a" / "metrics.jsonl")[0]["em"] == 0.5
    assert last_run_id(tmp_path / "a") is None


def test_where_mlflow_is(tmp_path, monkeypatch):
    assert tracking_uri(TrackingConfig(), tmp_path / "runs" / "a") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env")
    assert tracking_uri(TrackingConfig(), tmp_path) == "http://env"
    assert tracking_uri(TrackingConfig(uri="http://config"), tmp_path) == "http://config"


def test_the_store_lies_beside_the_run_whatever_the_name_of_the_folder(tmp_path):
    """In a URI, `%2F` is a slash and `?` ends the path."""
    folder = tmp_path / "feature%2Fa b#é?c" / "a"
    tracker = make_tracker(folder)
    tracker.log_metrics({"em": 0.5}, step=0)
    (folder / "notes.txt").write_text("written by a run")
    tracker.log_artifact(folder / "notes.txt")
    tracker.finish()
    assert sorted(file.name for file in folder.parent.iterdir()) == ["a", "mlartifacts", "mlflow.db"]
    run_id = last_run_id(folder)
    assert run_id is not None and client_of(folder).get_run(run_id).data.metrics["em"] == 0.5
    assert [file.name for file in (folder.parent / "mlartifacts").rglob("notes.txt")] == ["notes.txt"]
    assert [file.path for file in client_of(folder).list_artifacts(run_id)] == ["config.yaml", "notes.txt"]
    assert database_file(tracking_uri(TrackingConfig(), folder)) == folder.parent / "mlflow.db"


def test_a_locked_store_delays_but_loses_nothing(tmp_path):
    folder = tmp_path / "a"
    make_tracker(folder).finish()
    lock = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    tracker = make_tracker(folder)
    started = time.perf_counter()
    tracker.log_metrics({"em": 0.5}, step=0)
    tracker.log_trajectories([make_group("q")], step=0)
    assert time.perf_counter() - started < AT_ONCE_S
    assert tracker.run_id(1.0) is None
    lock.execute("ROLLBACK")
    lock.close()
    summary = tracker.finish()
    assert (summary.num_unwritten, summary.num_refused) == (0, 0)
    assert client_of(folder).get_run(summary.run_id).data.metrics == {"em": 0.5}


def test_a_database_that_takes_nothing_is_no_traceback_in_the_terminal(tmp_path, caplog):
    tracker = make_tracker(tmp_path / "a")
    assert tracker.run_id(60.0)
    try:
        raise sqlite3.OperationalError("database or disk is full")
    except sqlite3.OperationalError:
        logging.getLogger("mlflow.store.db.utils").exception("as MLflow logs every such error")
    tracker.finish()
    assert not [record for record in caplog.records if record.exc_info]


def test_after_flush_the_metrics_are_in_mlflow(tmp_path):
    tracker = make_tracker(tmp_path / "a")
    tracker.log_metrics({"em": 0.5}, step=3)
    assert tracker.flush(60)
    (point,) = client_of(tmp_path / "a").get_metric_history(tracker.run_id(), "em")
    assert (point.step, point.value) == (3, 0.5)
    tracker.finish()


def test_flush_does_not_wait_for_a_server_that_fails(tmp_path):
    with server(busy) as uri:
        tracker = make_tracker(tmp_path / "a", config=TrackingConfig(uri=uri))
        tracker.log_metrics({"em": 0.5}, step=0)
        started = time.perf_counter()
        assert not tracker.flush(60)
        assert time.perf_counter() - started < 20
        tracker.finish(timeout_s=0.1)


def never(handler):
    time.sleep(30)


def busy(handler):
    handler.send_error(503)


def login_page(handler):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"<html>Please sign in</html>")


def logged_against(uri: str, folder: Path, caplog):
    tracker = make_tracker(folder, config=TrackingConfig(uri=uri))
    slowest = 0.0
    for step in range(20):
        started = time.perf_counter()
        tracker.log_metrics({"em": step / 20}, step=step)
        tracker.log_trajectories([make_group("q")], step=step)
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.01)
    started = time.perf_counter()
    summary = tracker.finish(timeout_s=1.0)
    assert time.perf_counter() - started < 1.0 + AT_ONCE_S
    assert slowest < AT_ONCE_S
    assert summary.run_id is None and summary.num_unwritten == 20 + 20 + 1 + 1  # metrics, traces, the config, the end
    assert [row["em"] for row in read_metrics(folder / "metrics.jsonl")] == [step / 20 for step in range(20)]
    (warning,) = [record.message for record in caplog.records if "incomplete" in record.message]
    assert warning.endswith("metrics.jsonl has every metric")
    assert sum("tried again" in record.message for record in caplog.records) <= 1
    return summary


def test_a_dead_server_does_not_slow_a_step(tmp_path, caplog):
    summary = logged_against(f"http://127.0.0.1:{free_ports(1)[0]}", tmp_path / "a", caplog)
    assert summary.num_refused == 0


@pytest.mark.parametrize("answer", [never, busy, login_page])
def test_a_bad_server_does_not_slow_a_step(tmp_path, caplog, answer):
    with server(answer) as uri:
        summary = logged_against(uri, tmp_path / "a", caplog)
    assert summary.num_refused == 0


def test_an_entry_that_can_never_be_written_is_counted_and_holds_nothing_up(tmp_path, caplog):
    tracker = make_tracker(tmp_path / "a")
    for _ in range(2):
        tracker.log_artifact(tmp_path / "missing")
    tracker.log_metrics({"em": 1.0}, step=0)
    summary = tracker.finish()
    assert (summary.num_refused, summary.num_unwritten, summary.num_failed_calls) == (2, 0, 0)
    client = client_of(tmp_path / "a")
    assert client.get_run(summary.run_id).info.status == "FINISHED" and client.get_run(summary.run_id).data.metrics == {
        "em": 1.0
    }
    assert sum("refuses" in record.message for record in caplog.records) == 1


def test_a_server_that_takes_no_files_has_every_metric_and_the_end_of_the_run(tmp_path):
    """Its files belong into a folder of its own machine, which this machine cannot write."""
    (tmp_path / "file").write_text("no folder")
    config = TrackingConfig(experiment="remote")
    client_of(tmp_path / "a").create_experiment("remote", artifact_location=f"file://{tmp_path}/file/mlartifacts")
    tracker = make_tracker(tmp_path / "a", config=config)
    tracker.log_metrics({"em": 1.0}, step=0)
    tracker.log_artifact(tmp_path / "file")
    summary = tracker.finish()
    assert (summary.num_refused, summary.num_unwritten) == (2, 0)
    run = client_of(tmp_path / "a").get_run(str(summary.run_id))
    assert run.info.status == "FINISHED" and run.data.metrics == {"em": 1.0} and run.data.params["name"] == "a"
    assert "refused 2 entries; the first: NotADirectoryError" in summary.losses[0]


@pytest.mark.parametrize(("status", "is_temporary"), [(413, False), (404, False), (403, True), (503, True)])
def test_a_file_that_a_server_refuses_is_not_sent_again(tmp_path, status, is_temporary):
    from requests import HTTPError, Response

    response = Response()
    response.status_code = status
    store = MlflowRun(TrackingConfig(), folder=tmp_path, run_name="a", run_config={}, resume_run_id=None)
    assert store.is_temporary(HTTPError("refused", response=response)) == is_temporary


def test_passwords_of_uris_are_not_recorded(tmp_path):
    config = RunConfig(tracking=TrackingConfig(uri="https://me:secret@host/mlflow")).model_dump(mode="json")
    summary = make_tracker(tmp_path / "a", run_config=config).finish()
    client = client_of(tmp_path / "a")
    assert client.get_run(summary.run_id).data.params["tracking.uri"] == "https://***@host/mlflow"
    recorded = Path(client.download_artifacts(summary.run_id, "config.yaml", str(tmp_path))).read_text()
    assert "secret" not in recorded and "host/mlflow" in recorded


def test_a_half_written_line_costs_only_itself(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "time": 1, "em": 0.1}\n{"step": 1, "ti')
    tracker = make_tracker(folder, config=TrackingConfig(enabled=False))
    tracker.log_metrics({"em": 0.3}, step=1)
    tracker.finish()
    assert [(row["step"], row["em"]) for row in read_metrics(folder / "metrics.jsonl")] == [(0, 0.1), (1, 0.3)]


def test_rows_of_one_step_are_merged_and_the_last_value_counts(tmp_path):
    tracker = make_tracker(tmp_path, config=TrackingConfig(enabled=False))
    tracker.log_metrics({"em": 0.1, "loss": 3.0}, step=2)
    tracker.log_metrics({"validation/em": 0.4}, step=2)
    tracker.log_metrics({"em": 0.0}, step=1)
    tracker.log_metrics({"em": 0.2}, step=2)
    tracker.finish()
    rows = [
        {name: value for name, value in row.items() if name != "time"}
        for row in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert rows == [{"step": 1, "em": 0.0}, {"step": 2, "em": 0.2, "loss": 3.0, "validation/em": 0.4}]


def test_mlflow_is_loaded_by_the_writer_alone_and_without_telemetry(tmp_path):
    code = f"""
import sys
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.tracker import Tracker
assert not [m for m in ("mlflow", "ray", "torch", "vllm", "transformers") if m in sys.modules]
Tracker(TrackingConfig(enabled=False), folder={str(tmp_path / "off")!r}, run_name="a", run_config={{}}).finish()
assert "mlflow" not in sys.modules
Tracker(TrackingConfig(), folder={str(tmp_path / "on")!r}, run_name="a", run_config={{}}).finish()
from mlflow.telemetry.utils import is_telemetry_disabled
from mlflow.telemetry import get_telemetry_client
assert is_telemetry_disabled() and get_telemetry_client() is None
assert not [m for m in ("ray", "torch", "vllm", "transformers") if m in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def history(folder: Path, run_id: str, key: str) -> list[tuple[int, float]]:
    """(step, value) of every point, as a chart of MLflow draws them."""
    return [(point.step, point.value) for point in client_of(folder).get_metric_history(run_id, key)]


def test_steps_that_are_made_again_stand_once_in_the_mlflow_run(tmp_path):
    folder = tmp_path / "a"
    first = make_tracker(folder)
    for step in range(4):
        first.log_metrics({"em": step / 10, "late": 1.0} if step == 3 else {"em": step / 10}, step=step)
    run_id = first.finish("FAILED").run_id
    again = make_tracker(folder, resume_run_id=run_id)
    again.restart_at(1)
    again.log_metrics({"em": 0.7}, step=2)
    summary = again.finish()
    assert (summary.run_id, summary.num_refused, summary.losses) == (run_id, 0, ())
    assert history(folder, run_id, "em") == [(0, 0.0), (1, 0.1), (2, 0.7)]
    assert client_of(folder).get_run(run_id).data.metrics == {"em": 0.7}  # "late" was of the step that is gone
    assert [(row["step"], row["em"]) for row in read_metrics(folder / "metrics.jsonl")] == history(folder, run_id, "em")


def test_steps_that_are_made_again_while_the_store_is_locked_stand_once_too(tmp_path):
    tracker = make_tracker(tmp_path / "run")
    for step in (1, 2, 3):
        tracker.log_metrics({"reward": step}, step=step)
    tracker.finish()
    run_id = str(last_run_id(tmp_path / "run"))
    said: list[str] = []
    again = make_tracker(tmp_path / "run", resume_run_id=run_id, tell=said.append)
    assert again.run_id(60) == run_id
    with sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        again.restart_at(1)
        deadline = time.monotonic() + 120
        while "database is locked" not in said[-1]:  # sqlite waits for seconds
            assert time.monotonic() < deadline
            time.sleep(0.05)
        other.execute("ROLLBACK")
    again.log_metrics({"reward": 20}, step=2)
    summary = again.finish()
    assert summary.num_refused == 0 and not summary.losses
    assert history(tmp_path / "run", run_id, "reward") == [(1, 1.0), (2, 20.0)]


def test_the_newest_value_is_that_of_the_last_step_which_stays(tmp_path):
    folder = tmp_path / "a"
    tracker = make_tracker(folder)
    for step in range(3):
        tracker.log_metrics({"em": step / 10, "kl": math.nan if step == 1 else 0.0}, step=step)
    assert tracker.flush(60)
    tracker.restart_at(1)
    run = client_of(folder).get_run(tracker.finish().run_id)
    assert run.data.metrics["em"] == 0.1 and math.isnan(run.data.metrics["kl"])


def test_only_the_run_that_begins_again_forgets_steps(tmp_path):
    other = make_tracker(tmp_path / "b")
    other.log_metrics({"em": 0.9}, step=5)
    run_id = other.finish().run_id
    tracker = make_tracker(tmp_path / "a")
    tracker.log_metrics({"em": 0.1}, step=5)
    tracker.flush(60)
    tracker.restart_at(0)
    tracker.finish()
    assert history(tmp_path / "b", run_id, "em") == [(5, 0.9)]


def test_a_database_that_is_removed_is_said_at_once_with_its_path(tmp_path):
    said: list[str] = []
    folder, database = tmp_path / "a", tmp_path / "mlflow.db"
    tracker = make_tracker(folder, tell=said.append)
    tracker.log_metrics({"em": 0.1}, step=0)
    assert tracker.flush(60) and not said
    database.unlink()
    tracker.log_metrics({"em": 0.2}, step=1)
    assert not tracker.flush(60)
    (sentence,) = said
    assert f"the database {database} was removed while the run continued" in sentence
    summary = tracker.finish(timeout_s=1.0)
    (loss,) = summary.losses
    # The config is a file that may be waiting: `flush` waits for metrics alone. The other is the end of the run.
    gone = f"StoreGone: the database {re.escape(str(database))} was removed"
    assert re.search(f"lacks 1 values and [12] traces or files: {gone}", loss)
    assert read_losses(folder) == [loss] and "metrics.jsonl has every metric" in said[-1]
    assert not database.exists()  # no empty one in its place


def test_a_file_that_is_no_database_is_said_once_and_in_one_line(tmp_path):
    said: list[str] = []
    (tmp_path / "mlflow.db").write_bytes(b"no database" * 1000)
    tracker = make_tracker(tmp_path / "a", tell=said.append)
    tracker.log_metrics({"em": 0.1}, step=0)
    assert not tracker.flush(60)
    time.sleep(2.0)  # it is tried again and again
    (sentence,) = said
    assert sentence.endswith("file is not a database") and str(tmp_path / "mlflow.db") in sentence
    assert "file is not a database" in tracker.finish(timeout_s=0.1).losses[0]


def test_a_database_that_is_away_for_a_while_lacks_nothing(tmp_path):
    said: list[str] = []
    folder, database = tmp_path / "a", tmp_path / "mlflow.db"
    tracker = make_tracker(folder, tell=said.append)
    tracker.log_metrics({"em": 0.1}, step=0)
    assert tracker.flush(60)
    database.rename(tmp_path / "away.db")
    tracker.log_metrics({"em": 0.2}, step=1)
    assert not tracker.flush(60)
    (tmp_path / "away.db").rename(database)
    summary = tracker.finish()
    assert summary.losses == () and history(folder, str(summary.run_id), "em") == [(0, 0.1), (1, 0.2)]
    assert "does not take entries" in said[0] and said[1].endswith("takes entries again") and len(said) == 2
    assert read_losses(folder) == []


def test_a_run_whose_database_is_gone_begins_a_new_one_with_all_its_metrics(tmp_path, empty_store):
    folder = tmp_path / "a"
    tracker = make_tracker(folder)
    tracker.log_metrics({"em": 0.1, "kl": math.nan}, step=0)
    tracker.log_metrics({"em": 0.2}, step=1)
    lost = tracker.finish("FAILED").run_id
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    again = make_tracker(folder, resume_run_id=last_run_id(folder))
    again.restart_at(1)
    again.log_metrics({"em": 0.3}, step=2)
    run_id = str(again.finish().run_id)
    assert run_id != lost and history(folder, run_id, "em") == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert client_of(folder).get_run(run_id).data.params["name"] == "a"


def test_a_server_that_failed_and_answers_again_is_said_once_each(tmp_path, monkeypatch):
    said: list[str] = []
    tracker = make_tracker(tmp_path / "a", tell=said.append)
    assert tracker.run_id(60)
    failures = iter([True, False, True, False])
    log = MlflowRun.log_metrics

    def sometimes(store: MlflowRun, entries) -> None:
        if next(failures, False):
            raise ConnectionError("reset")
        log(store, entries)

    monkeypatch.setattr(MlflowRun, "log_metrics", sometimes)
    for step in range(2):
        tracker.log_metrics({"em": 0.1}, step=step)
        time.sleep(0.2)  # for the call that fails
        while not tracker.flush(10):
            time.sleep(0.05)
    assert tracker.finish().losses == ()
    assert len(said) == 2 and "does not take entries" in said[0] and said[1].endswith("takes entries again")


def test_a_server_that_keeps_both_values_of_a_step_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.tracking.mlflow_writer.is_database", lambda uri: False)
    folder = tmp_path / "a"
    first = make_tracker(folder)
    first.log_metrics({"em": 0.1}, step=1)
    run_id = first.finish("FAILED").run_id
    again = make_tracker(folder, resume_run_id=run_id)
    again.restart_at(0)
    time.sleep(0.01)
    again.log_metrics({"em": 0.2}, step=1)
    again.finish()
    run = client_of(folder).get_run(str(run_id))
    assert run.data.metrics == {"em": 0.2}
    assert run.data.tags["mempipe.trained_again"].startswith("steps after 0, from ")


def test_traces_that_wait_for_a_dead_server_are_bounded_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.tracking.tracker.MAX_WAITING_TRACES", 3)
    config = TrackingConfig(uri=f"http://127.0.0.1:{free_ports(1)[0]}", traces_per_step=1)
    tracker = make_tracker(tmp_path / "a", config=config)
    for step in range(5):
        tracker.log_trajectories([make_group("q")], step=step)
    losses = tracker.finish(timeout_s=0.1).losses
    assert "2 traces were skipped while MLflow did not take entries" in losses
