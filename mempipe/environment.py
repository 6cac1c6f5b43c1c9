"""Every environment variable that mempipe sets, and why.

Libraries read most of them once, when they are first imported, so they are set for a process before it starts: by the
command for itself and its children, by Ray for the workers of other machines, and around the start of an engine.
"""

from __future__ import annotations

import locale
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Several processes share the cores: an OpenMP thread without work must sleep. One that spins takes the core from a
process that has work, which made decoding up to 8 times slower."""

NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

LOCAL_CLUSTER = {
    # Ray would start workers at niceness 15: where anything else computes as well, each gets a thirtieth of a core.
    "RAY_worker_niceness": "0",
    # A node gives up on its own parts after half a minute, which a busy machine may need.
    "RAY_agent_register_timeout_ms": "300000",
    # A node that is not up by then never is: it has ended because an agent took 15 s to start, and nobody was told.
    "RAY_raylet_start_wait_time_s": "45",
    # Ray would start a worker for each core beforehand; most roles have variables, and take none of them.
    "RAY_prestart_worker_first_driver": "0",
}
"""Variables of the Ray node that a run starts for itself."""

SERVICE = {
    "RAY_ROTATION_MAX_BYTES": str(16 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Variables of the Ray of a service. A replica has one event loop in place of Serve's three threads, which hand every
request over to each other; an answer needs ten of them. A service runs for months, so its logs are bounded: a log file
of 16 MiB is renamed, and the one that was renamed before it is removed. Ray alone keeps six files of 512 MiB of every
log, and all that a worker writes to its stderr."""

SMALL_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""On CPUs torch keeps what it made for a matrix product in bfloat16, 1,024 of them: a megabyte or more for every length
that a packed row has had, so that a learner grew with every step. One pass over a row needs about thirty."""

EVERY_PROCESS = {
    **SLEEPING_THREADS,
    **SMALL_KERNEL_CACHES,
    **NO_TELEMETRY,
    **LOCAL_CLUSTER,
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork, and it warns about that
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor without GPUs sees none, instead of those of others
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # a call that nobody waits for any more failed with the role that was lost
    # Ray warns of many worker processes on few cores, in 480 characters; a run whose actors were replaced has them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "PYTHON worker processes have been started on node",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it prints a trace of machine addresses at every SIGTERM
}
"""Variables of the command and all workers; a variable that the user has set is unchanged."""


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that only its own processes reach, and no HTTP proxy."""
PROXIES = [case(f"{scheme}_proxy") for scheme in ("http", "https", "all") for case in (str.lower, str.upper)]
"""Variables that name an HTTP proxy."""


def speak_utf8() -> None:
    """Starts this process again in Python's UTF-8 mode where the locale has another encoding; its children follow.

    Arguments, files and messages in any script could not be read or written there. A PYTHONUTF8 that is set stays.
    """
    if locale.getencoding().casefold() not in ("utf-8", "utf8") and "PYTHONUTF8" not in os.environ:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_process() -> None:
    """Sets EVERY_PROCESS for this process and its children. Where a proxy is set, LOOPBACK is asked without it."""
    for name, value in EVERY_PROCESS.items():
        os.environ.setdefault(name, value)
    if any(os.environ.get(name) for name in PROXIES):
        names = ("no_proxy", "NO_PROXY")  # of two that differ, some clients read the first and some the second
        given = next((os.environ[name] for name in names if os.environ.get(name)), "")
        hosts = [host.strip() for host in given.split(",") if host.strip()]
        if hosts != ["*"]:  # none for any host; clients read it as that only without other names
            os.environ.update(dict.fromkeys(names, ",".join(dict.fromkeys([*hosts, *LOOPBACK]))))


def worker_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the runtime environment of Ray workers that get variables.

    Ray starts such a worker by a line of a shell in which the path of Python is not quoted. A path that a shell would
    split is therefore passed on in quotes: without them no worker starts, and Ray tries it again for ever.
    """
    python = shlex.quote(sys.executable)
    return {"env_vars": dict(variables)} | ({} if python == sys.executable else {"py_executable": python})


def seen_gpus(gpus: str) -> dict[str, str]:
    """Returns the variables of a worker that sees these GPUs (numbers with commas), although Ray counts none for it and
    would hide them all."""
    return {"CUDA_VISIBLE_DEVICES": gpus, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Expandable segments of PyTorch's CUDA allocator: packed rows vary in length and fragment GPU memory. Incompatible
with the ipc weight transfer, which cannot export such memory."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network interface of ranks for data that is not on a GPU. Gloo would take the address of the host's name, often
127.0.1.1, which ranks of other nodes cannot reach."""

SHARED_TEMP = "MEMPIPE_SHARED_TEMP"
"""Holds the temporary folder of the machine, where its runs wait for each other, while TMPDIR is that of the run."""

VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
QUIET_ENGINE = {VLLM_LOG_LEVEL: "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Log levels of a script or a notebook that holds an engine. While they load, vLLM and torch would write notes about
Triton and memory nodes among its own output."""
FRONTEND_PID = "MEMPIPE_FRONTEND_PID"
"""Holds the id of the process that an engine belongs to, and with which it ends."""
ENGINE_FOLDER = "MEMPIPE_ENGINE_FOLDER"
"""Holds the folder of an engine that runs in a separate process; it is removed when the engine ends."""


def engine(*, frontend_pid: int, log_level: str = "ERROR") -> dict[str, str]:
    """Returns the environment of a vLLM engine and its workers, on any device."""
    return {
        **NO_TELEMETRY,
        FRONTEND_PID: str(frontend_pid),
        VLLM_LOG_LEVEL: log_level,
        # The caller has threads, and perhaps CUDA, which a fork does not survive.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def cpu_engine(*, num_threads: int, kv_cache_gib: int) -> dict[str, str]:
    """Returns the variables that an engine without a GPU needs in addition to `engine`."""
    return {
        **SLEEPING_THREADS,
        "OMP_NUM_THREADS": str(num_threads),
        # Bound to cores, all engines and learners of a small machine would use the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }


def engine_folder(folder: str, *, temporary: bool) -> dict[str, str]:
    """Returns the variables that a separate engine process needs in addition to `engine`, so that its sockets are in
    `folder`; vLLM leaves three behind at every start. With `temporary` all of its temporary files go there; on a GPU
    those are compiled kernels too, which the next start uses."""
    folders = {ENGINE_FOLDER: folder, "VLLM_RPC_BASE_PATH": folder}
    return folders | {"TMPDIR": folder} if temporary else folders


IN_PROCESS_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""A single CPU worker lives in the engine's own process: one process and one hop less."""

NO_FUSED_SAMPLER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""FlashInfer's sampler gives no log-probs of what it sampled from, so no completion here may use it. Unless told, an
engine on a GPU imports it, and warns where it cannot compile it."""

PICKLED_HANDLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""vLLM's `ipc` transfer sends pickled CUDA handles, from a learner to an engine of the same run."""
