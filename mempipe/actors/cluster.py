"""The connection to Ray: to an existing cluster, or to a local one that ends with the run. A driver whose raylet was
killed waits for ever, or Ray ends it without a message as soon as it puts an object into the store. Ray ends a driver
whose head is gone after a minute. A watch reports what happened and what to do.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray.exceptions import RayActorError, RayError

from mempipe.actors.lost import ClusterLost, LaunchError, one_line
from mempipe.actors.quiet import quiet_loggers, quiet_retries, take_note_of_pool_arguments
from mempipe.engines.config import ModelConfig
from mempipe.environment import EVERY_PROCESS, prepare_process, worker_environment
from mempipe.planning.capacity import object_store_bytes
from mempipe.planning.hosts import usable_memory
from mempipe.progress import say
from mempipe.settings import ConfigError
from mempipe.stop import children_ignore_sighup, keeps_sigterm_handler
from mempipe.storage.scratch import RAY, scratch_folder

LOOPBACK = "127.0.0.1"
KNOCK_TIMEOUT_S = 10.0
WATCH_EVERY_S = 2.0
SILENT_S = 45.0
"""The head of another cluster may be unreachable for so long: a network that is interrupted, or a head that Kubernetes
starts again and that has kept its state. After 60 s Ray ends the process without a sentence."""
RESUME = "Saved work is kept; run the same command again to resume (train: with --resume)"
"""What to do about a lost cluster, for the commands that resume."""
UNWIND_S = 10.0
"""Seconds that a run has to end by itself once its cluster is gone; calls of Ray may wait for it for ever."""
WAKE_AGAIN_S = 0.5
"""Seconds until a main thread that was not interrupted gets another signal."""
SHUTDOWN_S = 5.0
STREAM_THREADS = "StreamingExecutor-"
"""How Ray Data names the thread of a stream; the thread is the stream's executor."""
STREAM_END_S = 10.0
"""Seconds in which such a thread finishes its present call of Ray."""
NODE_IS_LATE = "the Ray node did not come up in time; starting it again"
"""Message of a retry of a local `ray.init`. Ray kills a node whose agents have not started within 15 s; the limit is
hard-coded, and importing the agents takes longer on a busy machine."""
NODE_STARTS = 4
"""How often a node is started at most."""
UNUSED_PROCESSES = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's Node that start processes which a local cluster does not use."""
IDLE_AGENT = Path(__file__).with_name("idle_agent.py")
_WAKE = signal.SIGUSR2  # Ray Tune takes SIGUSR1


def check_unconnected() -> None:
    """Raises ConfigError while this process is connected to Ray: a process has one connection, and a run makes its own,
    with variables that its workers need."""
    if ray.is_initialized():
        raise ConfigError(
            "this process is connected to Ray already (ray.init), and a run makes its own connection; call "
            "ray.shutdown() first, and name your cluster in ray_address if the run shall use it"
        )


@contextmanager
def connected(
    address: str,
    *,
    name: str,
    model: ModelConfig | None = None,
    logs: Path | None = None,
    metrics: bool = False,
    if_lost: str = RESUME,
) -> Iterator[str]:
    """Connects to Ray for the block and yields the run's namespace: to `address`, else RAY_ADDRESS, else to a new local
    cluster with an object store sized for `model`. Disconnects at the end (a local cluster stops).

    What is left in the temporary folder goes with the connection. When the run fails, the ends of the logs of a local
    cluster are kept in `logs`. Without `metrics` a local cluster has no port for Prometheus. Raises LaunchError when
    there is no cluster, ClusterLost when it ends meanwhile (its message ends with `if_lost`, which says what to do),
    and ConfigError as `check_unconnected` does.
    """
    check_unconnected()
    with (
        scratch_folder(logs=logs) as temporary,
        _connection(
            address, name=name, model=model, temporary=temporary, metrics=metrics, if_lost=if_lost
        ) as namespace,
    ):
        yield namespace


@contextmanager
def _connection(
    address: str, *, name: str, model: ModelConfig | None, temporary: Path, metrics: bool, if_lost: str
) -> Iterator[str]:
    namespace = f"mempipe-{name}-{uuid.uuid4().hex[:8]}"
    address = address or os.environ.get("RAY_ADDRESS", "")
    prepare_process()
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING, "log_to_driver": False}
    if address:
        options |= {"address": address, "runtime_env": worker_environment(EVERY_PROCESS)}
    else:
        options |= {
            "include_dashboard": False,
            "_node_ip_address": LOOPBACK,
            "_temp_dir": str(temporary / RAY),
            "object_store_memory": _object_store(model),
        }
    quiet_loggers()
    quiet_retries()
    try:
        with keeps_sigterm_handler():
            if address:
                _knock(address)
                ray.init(**options)
            else:
                with children_ignore_sighup():
                    _start_node(options, metrics=metrics)
    except OSError as error:
        if not address:
            raise LaunchError(f"Ray did not start: {one_line(error)}") from error
        raise LaunchError(
            f"cannot reach the Ray cluster at {address!r}; is it up, and is RAY_AUTH_MODE=token set? ({error})"
        ) from error
    except Exception as error:
        if not _is_late(error):
            raise
        late = "" if address else f"its node did not come up, {NODE_STARTS} times; is the machine too busy? "
        raise LaunchError(f"Ray did not start: {late}{one_line(error)}") from error
    watch = ClusterWatch(own=not address, if_lost=if_lost)
    try:
        with watch:
            take_note_of_pool_arguments()
            yield namespace
    except BaseException as error:
        if watch.lost:
            lost = ClusterLost(watch.lost)
            lost.was_said = True
            raise lost from error
        if isinstance(error, RayActorError):
            raise LaunchError(f"a role of the run died: {one_line(error)}") from error
        raise
    finally:
        _disconnect(lost=bool(watch.lost), own=not address)


class ClusterWatch:
    """Checks every few seconds that the cluster's head is reachable, and notices at once when this node's raylet ends,
    or the head of a cluster that this process started. It prints the message immediately, because the next call of Ray
    may end the process. The main thread is interrupted, and `connected` raises ClusterLost. A thread that waits inside
    Ray cannot be interrupted: then the watch ends the process.
    """

    def __init__(self, *, own: bool, if_lost: str) -> None:
        """`own`: the cluster was started by this process, whose children it is. `if_lost` ends the message."""
        self.lost = ""
        self._own = own
        self._if_lost = if_lost
        self._is_interrupted = False
        self._over = threading.Event()
        self._wake, self._waking = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)
        self._before: Any = None

    def __enter__(self) -> ClusterWatch:
        self._head = ray.get_runtime_context().gcs_address
        self._ends = _ends_of_processes(own=self._own)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_WAKE, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        os.write(self._waking, b"over")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waking)
        if self._before is not None:
            signal.signal(_WAKE, self._before)

    def _watch(self) -> None:
        events = select.poll()  # `select.select` takes no descriptor above 1023
        for descriptor in (self._wake, *self._ends):
            events.register(descriptor, select.POLLIN)
        answered = time.monotonic()
        try:
            while not self._over.is_set():
                ready = [descriptor for descriptor, _ in events.poll(WATCH_EVERY_S * 1000)]
                if self._over.is_set():
                    return
                if ready:
                    return self._end(self._ends[ready[0]])
                if not self._head or _answers(self._head):
                    answered = time.monotonic()
                elif time.monotonic() - answered > SILENT_S:
                    return self._end(f"the head of the Ray cluster at {self._head} does not answer")
        finally:
            for descriptor in self._ends:
                os.close(descriptor)

    def _end(self, reason: str) -> None:
        self.lost = f"the Ray cluster was lost: {reason}. {self._if_lost}"
        print(f"error: {self.lost}", file=sys.stderr, flush=True)
        give_up = time.monotonic() + UNWIND_S
        while time.monotonic() < give_up:
            # Again: a signal that comes right before the main thread begins to wait in a system call wakes nobody.
            if self._before is not None and not self._is_interrupted:
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
            if self._over.wait(WAKE_AGAIN_S):
                return
        if self._own:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.lost and not self._is_interrupted:  # once: the clean-up that follows is left alone
            self._is_interrupted = True
            raise ClusterLost(self.lost)


def _ends_of_processes(*, own: bool) -> dict[int, str]:
    """Returns descriptors that are readable when a process has ended (`pidfd_open`), each with the sentence about it:
    of this node's raylet, and of the head of this process's own cluster. The head of another cluster may be started
    again. A process that is not of this machine and user, or cannot be seen, has none.
    """
    node = ray._private.worker._global_node
    wanted = {"raylet": (getattr(node, "raylet_socket_name", None), "Ray's raylet on this node ended")}
    if own:
        wanted["gcs_server"] = (getattr(node, "session_name", None), "the head of the Ray cluster ended")
    found: dict[int, str] = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        mark, sentence = wanted.get(process.info["name"], (None, ""))
        if mark and any(mark in word for word in process.info["cmdline"] or ()):
            with suppress(OSError):  # a kernel without pidfd_open: only the head's address is watched
                found[os.pidfd_open(process.pid)] = sentence
    return found


def _answers(address: str) -> bool:
    """Returns whether the address accepts connections; a stopped process does so too."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=WATCH_EVERY_S).close()
    except OSError:
        return False
    return True


def _disconnect(*, lost: bool, own: bool) -> None:
    """Disconnects from the cluster. Does not wait long for Ray to disconnect from a lost one, and kills the remaining
    processes of a lost one that this process started: some of them would notice the loss only after seconds."""
    if not lost:
        _end_streams()
        ray.shutdown()
        return
    node = ray._private.worker._global_node
    thread = threading.Thread(target=ray.shutdown, daemon=True)
    thread.start()
    thread.join(SHUTDOWN_S)
    if own and node:
        _kill(node)


def _kill(node: Any) -> None:
    """Kills the processes of a node that this process started, and their children. Workers whose raylet has died are
    nobody's children any more, and end by themselves within a second."""
    for each in chain.from_iterable([*node.all_processes.values()]):  # which Ray may still be taking out
        if each.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.process.pid)
                for one in (*process.children(recursive=True), process):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()


def _end_streams() -> None:
    """Ends the threads of Ray Data that an exception left at work. After `ray.shutdown` their next call would end the
    process with code 1 and without a message."""
    streams: list[Any] = [thread for thread in threading.enumerate() if thread.name.startswith(STREAM_THREADS)]
    for stream in streams:
        with suppress(RayError):
            stream.shutdown(force=True)
        stream.join(STREAM_END_S)


def _start_node(options: Mapping[str, Any], *, metrics: bool) -> None:
    """Starts a local cluster; a node that does not come up in time is started again, NODE_STARTS times in all."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    for start in range(1, NODE_STARTS + 1):
        try:
            with _on_loopback(), _needed_processes_only(metrics=metrics):
                ray.init(**options)
            return
        except Exception as error:
            if not _is_late(error):
                raise
            for process in set(me.children(recursive=True)) - before:  # the rest of the node
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if start == NODE_STARTS:
                raise
            say(NODE_IS_LATE)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Makes the node that is started inside the block listen on the loopback address only. On Linux Ray replaces that
    address by the one of a network interface, so that its dozen ports, which are open to every caller, would be reached
    from other machines. Ray's behaviour on other systems is the one that is needed, and no public argument requests it.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    of_user = os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"  # for this process, and for those that it starts
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if of_user is not None:
            os.environ[name] = of_user


@contextmanager
def _needed_processes_only(*, metrics: bool) -> Iterator[None]:
    """Makes the node that is started inside the block start without the processes that a local cluster does not use:
    the monitor that adds nodes, the server of a dashboard that is switched off, and the one that hands the lines of the
    logs to a driver that does not print them. They need 4 seconds of a core at the start and 1.5 per minute. Without
    `metrics` IDLE_AGENT replaces the agent that collects them. No public argument omits them.
    """
    before = {name: getattr(Node, name) for name in UNUSED_PROCESSES}
    python = services._build_python_executable_command_memory_profileable

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT and not metrics:
            return [sys.executable, "-I", "-S", str(IDLE_AGENT)]  # Ray appends its own agent and the arguments
        return python(component, *arguments, **options)

    try:
        services._build_python_executable_command_memory_profileable = command
        for name in before:
            setattr(Node, name, lambda *_, **__: None)
        yield
    finally:
        services._build_python_executable_command_memory_profileable = python
        for name, start in before.items():
            setattr(Node, name, start)


def _is_late(error: Exception) -> bool:
    """Returns whether `ray.init` timed out while starting a local node. Ray raises a plain `Exception` for that, hence
    the exact type check."""
    return type(error) is Exception


def _object_store(model: ModelConfig | None) -> int:
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    return object_store_bytes(model or ModelConfig(), memory=usable_memory(), shared_memory=shared)


def _knock(address: str) -> None:
    """Raises OSError if no process accepts connections at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
