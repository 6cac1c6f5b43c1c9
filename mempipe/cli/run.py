"""The commands that check, train, export and describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mempipe.checks.findings import refuse
from mempipe.cli.commands import EXIT_CONFIG, add_command, add_resume
from mempipe.engines.gpus import GPUS
from mempipe.progress import say
from mempipe.settings import ConfigError


def add_commands(commands: Any) -> None:
    """Adds the commands that check, train and export."""
    _add_jobs(commands)
    _add_checks(commands)
    _add_models(commands)


def _add_jobs(commands: Any) -> None:
    train = add_command(commands, "train", run_job, "train an agent: CONFIG [key=value ...]", continues=True)
    train.add_argument("config", help="a YAML file, or the name of one that comes with mempipe, e.g. quickstart")
    train.add_argument(
        "overrides", nargs="*", default=[], help="key=value with dotted keys, e.g. algorithm.group_size=16"
    )
    train.set_defaults(kind="run")
    add_resume(train)

    job = add_command(commands, "run", run_job, "run the job that a config of any kind describes", continues=True)
    job.add_argument("config", help="a YAML file; `kind: MODULE` in it names a user-defined kind (docs/extending.md)")
    job.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys")
    job.set_defaults(kind="")
    add_resume(job)

    chain = add_command(
        commands,
        "chain",
        run_job,
        "train several stages in order, and compare with and without the first: CONFIG [key=value ...]",
        continues=True,
    )
    chain.add_argument("config", help="a YAML file, e.g. jobs/configs/tiny_chain.yaml; run it again to resume")
    chain.add_argument("overrides", nargs="*", default=[], help="key=value, e.g. stages.memtrain.settings.num_steps=10")
    chain.set_defaults(kind="chain")


def _add_checks(commands: Any) -> None:
    doctor = add_command(commands, "doctor", _doctor, "check a config of any kind without starting anything")
    doctor.add_argument("config", help="a run, an evaluation, an index, a retrieval service or an agent service")
    doctor.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys")
    add_resume(doctor)
    doctor.add_argument(
        "--devices", type=int, help="GPUs to plan for (default: those of the config's cluster, or of this machine)"
    )
    doctor.add_argument(
        "--gpu",
        choices=sorted(GPUS),
        default="",
        help="GPU type; also prints an estimated step time (calculated, not measured)",
    )

    config = add_command(
        commands, "config", _config, "print a complete config with every setting's default and meaning"
    )
    config.add_argument(
        "kind",
        nargs="?",
        default="memsearcher",
        help="a run of an agent (memsearcher, memagent, memtrain, mem1, react, full_text, or your own module), chain, "
        "evaluation, sweep, index, documents, service, or agent-service",
    )
    config.add_argument("--short", action="store_true", help="of a run only what almost every run sets")


def _add_models(commands: Any) -> None:
    export = add_command(commands, "export", _export, "export a checkpoint as a Hugging Face folder")
    export.add_argument("run", metavar="RUN", help="the folder of a run, e.g. runs/quickstart")
    export.add_argument("folder", metavar="DIR", help="folder of the exported model; it must not exist")
    export.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, as PEFT saves it")
    _add_which_checkpoint(export)

    push = add_command(commands, "push", _push, "publish a trained agent on the Hugging Face hub")
    push.add_argument("source", metavar="RUN_OR_EXPORT", help="the folder of a run, or one that `mempipe export` wrote")
    push.add_argument("repository", metavar="OWNER/NAME", help="the repository, e.g. ada/quickstart-agent")
    push.add_argument("--public", action="store_true", help="a new repository can be read by everybody")
    _add_which_checkpoint(push)


def _add_which_checkpoint(command: argparse.ArgumentParser) -> None:
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the learner step (default: the last whole one that has a checkpoint)")
    which.add_argument("--best", action="store_true", help="the best checkpoint on validation (checkpoint.best_on)")


def run_job(arguments: argparse.Namespace) -> None:
    """Checks the config of a job, and does the work."""
    from mempipe.loader import load_job
    from mempipe.runs import check_place

    resume = vars(arguments).get("resume", "never")
    kind, config = load_job(arguments.config, arguments.overrides, kind=arguments.kind)
    if not kind.main:
        raise ConfigError(f"{arguments.config} describes {kind.described}; `{kind.command}` takes it")
    check_place(arguments.config, config, resume=resume)
    refuse(kind.findings(config, resume=resume))
    say(f"{getattr(config, 'folder', kind.described)}: checked; loading")
    kind.run(config, resume=resume)


def _doctor(arguments: argparse.Namespace) -> int:
    from mempipe.doctor import examine

    findings = examine(
        arguments.config, arguments.overrides, resume=arguments.resume, num_gpus=arguments.devices, gpu=arguments.gpu
    )
    for finding in findings:
        print(finding)
    return EXIT_CONFIG if any(finding.fatal for finding in findings) else 0


def _config(arguments: argparse.Namespace) -> None:
    from mempipe.template import config_lines

    print("\n".join(config_lines(arguments.kind, short=arguments.short)))


def _export(arguments: argparse.Namespace) -> None:
    from pipelines.export import export_adapter, export_best, export_run

    run, target = Path(arguments.run), Path(arguments.folder)
    if arguments.best:
        if arguments.adapter:
            raise ConfigError("--adapter: a run keeps its best model merged; name a checkpoint instead (--step)")
        print(export_best(run, target))
    else:
        write = export_adapter if arguments.adapter else export_run
        print(write(run, target, step=arguments.step))


def _push(arguments: argparse.Namespace) -> None:
    from pipelines.push import push

    name, address = push(
        Path(arguments.source),
        arguments.repository,
        step=arguments.step,
        best=arguments.best,
        public=arguments.public,
    )
    print(f"{address}: to ask it elsewhere, hf download {name} --local-dir agent && mempipe ask agent 'a question'")
