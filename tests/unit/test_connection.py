"""A cluster that cannot be reached, or does not start, is said in a sentence."""

from __future__ import annotations

import inspect
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import ray
from ray.data._internal.execution.streaming_executor import StreamingExecutor

from mempipe.actors import cluster
from mempipe.actors.cluster import connected
from mempipe.actors.lost import ClusterLost, LaunchError
from mempipe.engines.config import ModelConfig
from mempipe.planning.capacity import GIB


def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with (
        pytest.raises(LaunchError, match=rf"cannot reach the Ray cluster at '{address}'"),
        connected(address, name="x"),
    ):
        pass


def test_a_node_that_is_late_is_started_once_more(monkeypatch, capsys):
    started = []

    def init(**options):
        started.append(options)
        if len(started) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    cluster._start_node({"namespace": "x"}, metrics=True)
    assert started == [{"namespace": "x"}] * 2
    assert capsys.readouterr().out.count(cluster.NODE_IS_LATE) == 1


def test_the_end_of_the_raylet_is_noticed_by_a_process_with_many_open_files(monkeypatch, capsys):
    raylet = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(cluster, "_ends_of_processes", lambda **_: {os.pidfd_open(raylet.pid): "Ray's raylet ended"})
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed[1], allowed[1]))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        with (
            pytest.raises(ClusterLost, match=r"raylet ended\. Try again$"),
            cluster.ClusterWatch(own=False, if_lost="Try again"),
        ):
            raylet.kill()
            time.sleep(60)  # the watch interrupts it
    raylet.wait()
    assert capsys.readouterr().err.count("error: the Ray cluster was lost") == 1


def test_a_main_thread_that_misses_the_interruption_is_interrupted_again(monkeypatch, capsys):
    raylet, missed = subprocess.Popen(["sleep", "60"]), []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(cluster, "_ends_of_processes", lambda **_: {os.pidfd_open(raylet.pid): "Ray's raylet ended"})
    send = signal.pthread_kill
    monkeypatch.setattr(signal, "pthread_kill", lambda *to: send(*to) if missed else missed.append(to))
    with (
        pytest.raises(ClusterLost, match=r"raylet ended\. Try again$"),
        cluster.ClusterWatch(own=False, if_lost="Try again"),
    ):
        raylet.kill()
        time.sleep(60)
    raylet.wait()
    assert len(missed) == 1 and capsys.readouterr().err.count("error: the Ray cluster was lost") == 1


def test_a_head_that_comes_back_ends_nothing_and_one_that_stays_away_does(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "WATCH_EVERY_S", 0.02)
    monkeypatch.setattr(cluster, "SILENT_S", 2.0)
    monkeypatch.setattr(cluster, "_ends_of_processes", lambda **_: {})
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{address[1]}"))
    with (
        pytest.raises(ClusterLost, match=rf"the head of the Ray cluster at \S+:{address[1]} does not answer"),
        cluster.ClusterWatch(own=False, if_lost="Try again") as watch,
    ):
        time.sleep(0.2)
        with socket.create_server(address):
            time.sleep(0.2)
            assert not watch.lost
        time.sleep(60)
    assert capsys.readouterr().err.count("error: the Ray cluster was lost") == 1


def test_the_start_of_a_node_leaves_the_variables_of_the_user_as_they_are(monkeypatch):
    seen = []
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ[name]))
    name = cluster.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    for of_user in ("1", None):
        monkeypatch.setenv(name, "1") if of_user else monkeypatch.delenv(name)
        cluster._start_node({}, metrics=True)
        assert os.environ.get(name) == of_user
    assert seen == ["0", "0"] and cluster.ray_constants.ENABLE_RAY_CLUSTER


def test_a_node_that_does_not_come_up(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**options):
        raise error

    monkeypatch.setattr(ray, "init", init)
    error = Exception("The current node timed out\n during startup.")
    late = r"^Ray did not start: its node did not come up, 4 times; .* The current node timed out during startup\.$"
    with pytest.raises(LaunchError, match=late):
        connected("", name="x").__enter__()
    error = PermissionError(13, "Permission denied", "/tmp/ray")
    with pytest.raises(LaunchError, match=r"^Ray did not start: .*Permission denied: '/tmp/ray'$"):
        connected("", name="x").__enter__()
    error = TypeError("init() got an unexpected keyword argument")  # a mistake of ours keeps its name and its trace
    with pytest.raises(TypeError):
        connected("", name="x").__enter__()


class Stream(threading.Thread):
    """Stands for the thread of a stream of Ray Data, which makes one call of Ray after another until its end."""

    def __init__(self) -> None:
        super().__init__(name="StreamingExecutor-7", daemon=True)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.01):
            pass
        time.sleep(0.2)  # the last call

    def shutdown(self, *, force: bool) -> None:
        self._over.set()


def test_no_stream_is_at_work_when_ray_shuts_down(monkeypatch):
    stream, at_work = Stream(), []
    monkeypatch.setattr(ray, "shutdown", lambda: at_work.append(stream.is_alive()))
    stream.start()
    cluster._disconnect(lost=False, own=True)
    assert at_work == [False]


def test_ray_data_names_its_threads_as_they_are_looked_for():
    source = inspect.getsource(StreamingExecutor.__init__)
    assert f'f"{cluster.STREAM_THREADS}{{' in source and issubclass(StreamingExecutor, threading.Thread)


def test_the_object_store_of_a_container_is_sized_by_its_limit(monkeypatch):
    monkeypatch.setattr(cluster, "usable_memory", lambda: 4 * GIB)  # of the container; the machine has a TB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=512 * GIB))
    assert cluster._object_store(ModelConfig(path="Qwen/Qwen2.5-3B-Instruct")) == pytest.approx(0.3 * 4 * GIB, abs=1)
