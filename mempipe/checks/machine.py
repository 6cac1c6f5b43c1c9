"""Checks the resources of this machine: devices, memory, folders, ports, addresses. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mempipe.checks.findings import Finding, fatal, ok
from mempipe.engines.gpus import GIB
from mempipe.planning.hosts import usable_memory
from mempipe.settings import ConfigError

TIMEOUT_S = 5.0
NVIDIA_SMI_S = 60.0
"""Seconds in which nvidia-smi must answer. Where no process keeps the driver loaded, it initialises every GPU first, so
that a machine with eight of them takes half a minute."""
DEFAULT_GPU_GIB = 79.2  # as CUDA reports 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators that roles can be placed on, and the memory of their machine."""

    num_gpus: int
    gpu_gib: float = DEFAULT_GPU_GIB
    """Memory of the smallest GPU."""
    host_gib: float = 0.0
    """Memory of the machine, or of the container; 0: unknown, for a cluster that is elsewhere."""
    gpu: str = ""
    """The type of GPU, of `mempipe.engines.gpus`; empty: not known, and no seconds are estimated."""


def devices_here() -> Devices:
    """Asks nvidia-smi, and the operating system; torch, which knows the same, takes seconds to import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in (visible or "").split(",") if name.strip() not in ("", "-1")]
    gpus = _gpu_gib() if visible is None or names else []
    if visible is not None and all(map(str.isdecimal, names)):
        gpus = [gpus[int(name)] for name in names if int(name) < len(gpus)]
    elif visible is not None:  # by identifiers, which are not asked for
        gpus = gpus[: len(names)]
    return Devices(num_gpus=len(gpus), gpu_gib=min(gpus, default=DEFAULT_GPU_GIB), host_gib=usable_memory() / GIB)


def is_on_a_cluster(ray_address: str) -> bool:
    """Returns whether roles run on a cluster whose devices are not this machine's."""
    return bool(ray_address or os.environ.get("RAY_ADDRESS"))


def check_writable(folder: Path, *, setting: str) -> Finding:
    """Checks that the folder, or the nearest existing one above it, can be written."""
    existing, absent = folder, "" if folder.exists() else str(folder)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return fatal(f"{setting} is {str(folder)!r}, but {existing} is not a directory", absent=absent)
    if not os.access(existing, os.W_OK | os.X_OK):
        return fatal(f"{setting} is {str(folder)!r}: no permission to write to {existing}", absent=absent)
    try:  # permissions are not sufficient: /proc, a full disk, a read-only mount
        tempfile.TemporaryDirectory(dir=existing, prefix=".mempipe-").cleanup()
    except OSError as error:
        text = f"{setting} is {str(folder)!r}: no folder can be made in {existing}: {error.strerror}"
        return fatal(text, absent=absent)
    return ok(f"{setting}: {folder}")


def check_port(host: str, port: int) -> Finding:
    """Checks that a server can listen there."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        return fatal(f"--host {host} --port {port}: {reason}; choose another")
    return ok(f"port {port} of {host} is free")


def check_local_service(host: str, port: int, *, deployed_by: str) -> list[Finding]:
    """Checks that a service can open on this machine, and that no cluster is meant.

    `deployed_by` is the config that deploys it to one.
    """
    findings = [check_port(host, port)]
    if os.environ.get("RAY_ADDRESS"):
        text = "RAY_ADDRESS is set, but this service runs on this machine alone; unset it, or deploy"
        findings.append(fatal(f"{text} {deployed_by} to the cluster with `serve deploy`"))
    return findings


def check_cluster(address: str) -> list[Finding]:
    """Checks that a process listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return []
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return [fatal(f"ray_address is {address!r}, where no cluster can be reached ({error}); is it up?")]
    return [ok(f"ray_address: {address}")]


def _gpu_gib() -> list[float]:
    """Returns the memory of every GPU of this machine in GiB; an empty list without nvidia-smi. Raises ConfigError if
    it gives no answer, since a plan for CPUs would not be that of a machine with GPUs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{command} gave no answer within {NVIDIA_SMI_S:g} s, so that the GPUs are not known; mend the driver, or "
            "set CUDA_VISIBLE_DEVICES to an empty text to use none"
        ) from error
    except OSError:
        return []
    lines = [line.strip() for line in listed.stdout.split("\n")]
    # "[N/A]" is said of a GPU that shares the memory of its machine.
    return [
        float(line) / 1024 if line.isdigit() else usable_memory() / GIB
        for line in lines
        if line.isdigit() or line.startswith("[")
    ]
