"""A local cluster cannot be reached from another machine, and it and its actors leave nothing in the temporary folder,
whether a run ends, fails or is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import ipaddress, os, sys, tempfile
from contextlib import suppress
from pathlib import Path
from mempipe.actors.handles import start_actor
from mempipe.actors.cluster import connected
import psutil, ray

class Leaver:
    def leave(self):
        return tempfile.mkstemp()[1]

    def address(self):
        return ray.util.get_node_ip_address()

def check_ports(leaver):
    addresses = {ray.util.get_node_ip_address(), ray.get(leaver.address.remote())}
    assert addresses == {"127.0.0.1"}, addresses
    me = psutil.Process()
    sockets = me.net_connections()
    for process in me.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            sockets += process.net_connections()
    listening = [ipaddress.ip_address(each.laddr.ip) for each in sockets if each.status == psutil.CONN_LISTEN]
    open_to_others = [str(each) for each in listening if not (getattr(each, "ipv4_mapped", None) or each).is_loopback]
    assert len(listening) > 5 and not open_to_others, open_to_others
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ  # another cluster may be asked for later

def check_processes():
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("gcs_server" in command for command in commands), commands
    names = ("monitor.py", "dashboard.py", "log_monitor", "ray::IDLE", "default_worker.py")
    unused = [each for each in commands if any(name in each.partition(" --")[0] for name in names)]
    assert not unused, unused
    assert [node["MetricsExportPort"] for node in ray.nodes()] == [-1], "no agent collects metrics"

before = {*Path("/tmp/ray").glob("session_*")}  # of other commands, whose numbers may begin as this one's does
with connected("", name="leaver", logs=Path(sys.argv[1])):
    leaver = start_actor(Leaver, {})
    left = ray.get(leaver.leave.remote())
    check_ports(leaver)
    check_processes()
    assert os.stat(tempfile.gettempdir()).st_mode & 0o777 == 0o700
    assert os.path.dirname(left) == tempfile.gettempdir() != os.environ["SHARED"], left
    made = [each.name for each in Path("/tmp/ray").glob("session_*") if each not in before]
    assert not any(name.endswith("_%d" % os.getpid()) for name in made), made
    if sys.argv[2] == "fails":
        raise RuntimeError("a role died")
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
"""


def run(shared: str, logs: Path, end: str) -> int:
    names = ("RAY_ADDRESS", "RAY_TMPDIR", "MEMPIPE_SHARED_TEMP", "MEMPIPE_DEBUG")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"TMPDIR": shared, "SHARED": shared}
    return subprocess.run([sys.executable, "-c", RUN, str(logs), end], env=environment, timeout=300).returncode


def test_a_cluster_is_on_the_loopback_address_and_leaves_nothing_in_the_temporary_folder(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="mp-") as shared:
        assert run(shared, tmp_path / "logs", "killed") == -signal.SIGKILL
        assert run(shared, tmp_path / "logs", "ends") == 0
        assert os.listdir(shared) == [] and not (tmp_path / "logs").exists()
        assert run(shared, tmp_path / "logs", "fails") == 1
        assert os.listdir(shared) == []
    assert any(file.name.startswith("worker-") for file in (tmp_path / "logs").iterdir())
