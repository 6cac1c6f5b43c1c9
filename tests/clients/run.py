"""`make test-clients`: other clients of the OpenAI API, unchanged, against the agent service.

    make test-clients                      all of them
    make test-clients CLIENT=litellm       one of them

Each has a virtual environment below `.clients/` with the newest version of the package index; their pins collide
(llama-index needs openai 2, inspect-ai openai 3). The service runs here, with a scripted policy, an API key and a
prompt set that has a place for instructions. The tests of a client (`NAME_calls.py`) run in the client's environment
and reach the service over HTTP. The last lines say which passed with which versions; the exit code is 1 where a call
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

from service_builders import QUESTIONS, Service, build_service, config_with_instructions, running

from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.serve.http.keys import KeyRecord, new_key
from mempipe.settings import ConfigError
from tools.guard import leave_nothing_behind

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = {
    "litellm": ["litellm"],
    "llama_index": ["llama-index-llms-openai-like"],
    "instructor": ["instructor"],
    "inspect_ai": ["inspect-ai", "openai"],
    "openai_agents": ["openai-agents"],
}
"""The packages to install for each client."""
TIMEOUT_S = 120
"""Of one test."""
TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)


def environment(name: str, packages: Sequence[str]) -> Path:
    """Returns the interpreter of a client's environment, with the newest versions of its packages and pytest.

    Raises ConfigError when pip cannot install them.
    """
    folder = ROOT / ".clients" / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, clear=True, symlinks=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    command = [*pip, "--upgrade-strategy=eager", "pytest", "pytest-timeout", *packages]
    if subprocess.run(command, env=_variables(), check=False).returncode:
        raise ConfigError(f"{name}: pip could not install {' '.join(packages)}; its reason is above")
    return python


def versions(python: Path, package: str) -> str:
    """Returns what was tried: `litellm 1.110.2 with openai 3.57.0`."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    found = [next(iter(Distribution.discover(name=each, path=[str(site)]))) for each in (package, "openai")]
    return " with ".join(f"{each.name} {each.version}" for each in found)


def service_with(record: KeyRecord, folder: Path) -> Service:
    """Returns a service with one key, whose agent reads long questions and instructions."""
    build_tokenizer(folder)
    config = config_with_instructions(folder, "budget.question_tokens=1024", "budget.context_tokens=2048")
    agents = {"memsearcher": config}
    service = build_service(load_tokenizer(str(folder)), folder, agents=agents, keys=[record])

    @service.app.post("/v1/engine")
    def engine(says: list[str]) -> dict[str, list]:
        """Returns what the policy got since the last look; `says` are its next messages."""
        seen = {name: [*getattr(service.engine, name)] for name in ("prompts", "limits", "seeds")}
        for each in (service.engine.prompts, service.engine.limits, service.engine.seeds):
            each.clear()
        service.engine.says[:] = says
        return seen

    return service


def passes(name: str, python: Path, served: dict[str, str]) -> bool:
    """Runs the tests of a client in its environment, where nothing of this one is on the path."""
    pytest = [str(python), "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={HERE}", "--noconftest"]
    command = [*pytest, "-p", "no:cacheprovider", "--disable-warnings", f"--timeout={TIMEOUT_S}"]
    variables = _variables() | {"MEMPIPE_SERVED": json.dumps(served)}
    return not subprocess.run([*command, str(HERE / f"{name}_calls.py")], env=variables, check=False).returncode


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all unless given")
    asked = parser.parse_args(argv).clients or [*CLIENTS]
    if unknown := sorted({*asked} - {*CLIENTS}):
        parser.error(f"CLIENT is {unknown[0]!r}; it should be one of {', '.join(CLIENTS)}")
    leave_nothing_behind()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        key, record = new_key("clients")
        with running(service_with(record, Path(folder))) as url:
            served = {"url": url, "key": key, "question": TWO_HOPS.text, "gold": TWO_HOPS.golden_answers[0]}
            for name in asked:
                print(f"\n{name}", flush=True)
                try:
                    python = environment(name, CLIENTS[name])
                    rows.append((passes(name, python, served), versions(python, CLIENTS[name][0])))
                except ConfigError as error:
                    rows.append((False, str(error)))
    print("\n".join(["", *(f"{'passed' if passed else 'FAILED'}  {what}" for passed, what in rows)]))
    return int(not all(passed for passed, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
