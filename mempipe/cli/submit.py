"""The command that runs a job on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mempipe.cli.commands import add_command, add_resume
from mempipe.progress import say, waiting
from mempipe.settings import ConfigError

TAKE_RESUME = ("train", "run", "sweep")
"""Commands that have --resume; the others resume without it."""


def add_commands(commands: Any) -> None:
    submit = add_command(
        commands, "submit", _submit, "run the job, or deploy the service, of a config on a Ray cluster"
    )
    submit.add_argument(
        "config", help="a YAML file: a training run, chain, sweep, evaluation, index, documents or service"
    )
    submit.add_argument("overrides", nargs="*", default=[], help="key=value, e.g. output=/shared/runs")
    submit.add_argument(
        "--address",
        default="",
        metavar="URL",
        help="the cluster's dashboard, e.g. http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS, or this machine's)",
    )
    submit.add_argument("--no-wait", action="store_true", help="do not follow the job's log, or the service's start")
    submit.add_argument("--dry-run", action="store_true", help="print the command of Ray and submit nothing")
    add_resume(submit)


def _submit(arguments: argparse.Namespace) -> int:
    """Checks the config of a job, submits the job to a cluster, and ends with its exit code."""
    from mempipe.submission import checked_job, find_cluster, is_service

    if is_service(arguments.config):
        return _deploy(arguments)
    job = checked_job(arguments.config, arguments.overrides, resume=arguments.resume)
    command = " ".join(job.command)
    if arguments.resume != "never" and command not in TAKE_RESUME:
        raise ConfigError(f"`mempipe {command}` has no --resume; after an interruption the same submission resumes it")
    cluster = find_cluster(arguments.address)
    from mempipe.actors.job_server import JobServer

    server = JobServer(cluster.address, environment=cluster.environment)
    print(cluster.submission(job), flush=True)
    for text in job.unchecked:
        say(f"the job will check on the cluster: {text}")
    if arguments.dry_run:
        return 0
    with waiting(f"shipping {job.folder}"):
        job_id = server.submit(job.entrypoint, job.runtime_env)
    say(f"submitted: {job_id}")
    later = (
        f"follow it with: {cluster.ray_job('logs', '--follow', job_id)}\n"
        f"stop it with: {cluster.ray_job('stop', job_id)}"
    )
    if arguments.no_wait:
        print(later)
        return 0
    try:
        return server.follow(job_id)
    except (KeyboardInterrupt, RuntimeError):
        print(f"{job_id} was not stopped\n{later}", file=sys.stderr)
        raise


def _deploy(arguments: argparse.Namespace) -> int:
    """Checks a Ray Serve config, deploys it on a cluster as `serve deploy` does, and ends when its applications run."""
    from mempipe.actors.dashboard import prepare
    from mempipe.submission import checked_service, find_cluster

    if words := [*arguments.overrides, *(["--resume"] if arguments.resume != "never" else [])]:
        raise ConfigError(f"{words[0]}: `mempipe submit` deploys {arguments.config} as it is; change the file instead")
    cluster = find_cluster(arguments.address)
    prepare(cluster.address, cluster.environment)  # the checks read Ray Serve's schema, and import Ray for it
    unchecked = checked_service(arguments.config)
    from mempipe.actors.deployments import Deployments
    from mempipe.loader import read_values

    services = Deployments(cluster.address)
    print(cluster.serve("deploy", arguments.config), flush=True)
    for text in unchecked:
        say(f"the service will check on the cluster: {text}")
    if arguments.dry_run:
        return 0
    names = services.deploy(read_values(arguments.config))
    later = f"see how it is with: {cluster.serve('status')}"
    if arguments.no_wait:
        print(later)
        return 0
    try:
        services.follow(names)
    except (KeyboardInterrupt, RuntimeError):
        print(f"{', '.join(names)} stay deployed\n{later}", file=sys.stderr)
        raise
    return 0
