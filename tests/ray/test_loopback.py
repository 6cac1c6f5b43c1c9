"""A cluster of this machine cannot be reached from another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LISTENS = """
import ipaddress, os
import psutil, ray
from mempipe.actors.cluster import connected

def address():
    return ray.util.get_node_ip_address()

with connected("", name="alone"):
    addresses = {address(), ray.get(ray.remote(num_cpus=0)(address).remote())}
    assert addresses == {"127.0.0.1"}, addresses
    me = psutil.Process()
    sockets = [each for process in (me, *me.children(recursive=True)) for each in process.net_connections()]
    listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
    addresses = [ipaddress.ip_address(ip) for ip in listening]
    open_to_others = [str(each) for each in addresses if not (getattr(each, "ipv4_mapped", None) or each).is_loopback]
    print(len(listening), open_to_others)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ  # another cluster may be asked for later
"""


@pytest.mark.ray
@pytest.mark.slow
def test_every_port_of_a_local_cluster_is_on_the_loopback_address(tmp_path: Path):
    (tmp_path / "listens.py").write_text(LISTENS)
    done = subprocess.run([sys.executable, "listens.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number, open_to_others = done.stdout.split(maxsplit=1)
    assert int(number) > 5 and open_to_others.strip() == "[]"
