"""Promise 10: no surprise at import; and who may import whom (docs/architecture.md)."""

import ast
import collections
import functools
import graphlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "torch", "vllm", "faiss", "transformers", "sentence_transformers", "bm25s", "mlflow")
HEAVY += ("sklearn", "scipy.stats", "scipy.optimize")  # for nothing used here (mempipe.engines.lean_libraries)
HEAVY += ("peft",)  # of a policy with an adapter only

# module -> heavy libraries that importing it may bring in
ALLOWED = {
    "mempipe": (),
    "mempipe.api.run": (),
    "mempipe.api.results": (),
    "mempipe.api.agent": ("transformers",),
    "mempipe.api.evaluation": ("transformers",),
    "mempipe.api.sweep": ("transformers",),
    "mempipe.types": (),
    "mempipe.settings": (),
    "mempipe.config": (),
    "mempipe.loader": (),
    "mempipe.kinds": (),
    "mempipe.text": (),
    "mempipe.storage.files": (),
    "mempipe.http_client": (),
    "mempipe.cli": (),
    "mempipe.planning.capacity": (),
    "mempipe.planning.ledger": (),
    "mempipe.planning.placement": (),
    "mempipe.planning.costs": (),
    "mempipe.planning.hosts": (),
    "mempipe.template": (),
    "mempipe.checks.run": (),
    "mempipe.checks.evaluation": (),
    "mempipe.checks.chain": (),
    "mempipe.checks.retrieval": (),
    "mempipe.doctor": (),
    "mempipe.submission": (),
    "mempipe.runs": (),
    "mempipe.agents.registry": (),
    "mempipe.agents.memsearcher": (),
    "mempipe.agents.protocol": (),
    "mempipe.rl.rewards": (),
    "mempipe.rl.advantages": (),
    "mempipe.rl.samples": (),
    "mempipe.rl.packing": (),
    "mempipe.rl.losses": ("torch",),
    "mempipe.rollout": (),
    "mempipe.data.world": (),
    "mempipe.data.scripted_agents": (),
    "mempipe.data.qa": (),
    "mempipe.data.ruler": (),
    "mempipe.data.corpus": (),
    "mempipe.masking.entities": (),
    "mempipe.masking.cloze": (),
    "mempipe.masking.config": (),
    "mempipe.masking.documents": (),
    "mempipe.data.trajectories": (),
    "mempipe.evaluation.memory_quality": (),
    "mempipe.evaluation.rollout_metrics": (),
    "mempipe.evaluation.metrics": (),
    "mempipe.evaluation.statistics": (),
    "mempipe.evaluation.suite": (),
    "mempipe.studies.chain": (),
    "mempipe.evaluation.benchmarks": (),
    "mempipe.evaluation.results": (),
    "mempipe.studies.compare": (),
    "mempipe.studies.budgets": (),
    "mempipe.studies.sweep": (),
    "mempipe.evaluation.judge": (),
    "mempipe.evaluation.recall": (),
    "mempipe.evaluation.closed_book": (),
    "mempipe.reports.training": (),
    "mempipe.reports.evaluation": (),
    "mempipe.reports.budgets": (),
    "mempipe.tracking.tracker": (),
    "mempipe.actors.admission": (),
    "mempipe.actors.pools": ("ray",),
    "mempipe.actors.generator": ("ray",),  # what it runs on is imported where it runs, not where a handle to it is
    "mempipe.actors.learner_group": ("ray",),
    "mempipe.actors.retriever": ("ray",),
    "mempipe.actors.launch": ("ray", "transformers"),
    "mempipe.actors.driver": ("ray", "transformers"),
    "mempipe.streams.groups": ("ray", "transformers"),
    "mempipe.engines.tokenizer": ("transformers",),
    "mempipe.engines.endpoint": (),
    "mempipe.engines.checkpoint": (),
    "mempipe.engines.proof": (),
    "mempipe.engines.weights": (),
    "mempipe.engines.model": ("torch", "transformers"),
    "mempipe.engines.learner": ("torch", "transformers"),
    "mempipe.engines.generator": (),
    "mempipe.engines.reference": ("torch", "transformers"),
    "mempipe.retrieval.encoders": (),
    "mempipe.retrieval.bm25": (),
    "mempipe.retrieval.manifest": (),
    "mempipe.retrieval.passages": (),
    "mempipe.retrieval.vectors": ("faiss",),
    "mempipe.retrieval.build": ("faiss",),
    "mempipe.retrieval.retriever": ("faiss",),
    "mempipe.retrieval.remote": ("faiss",),
    "mempipe.answers.answering": (),
    "mempipe.serve.http.gate": (),
    "mempipe.serve.agent_app": (),
    "mempipe.serve.replicas.agent_replica": ("ray", "transformers"),
    "mempipe.serve.replicas.retriever_replica": ("ray", "faiss"),
    "mempipe.serve.retrieval_app": ("faiss",),
    "mempipe.training.training_rows": (),
}


@functools.cache
def brought_in(allowance: tuple[str, ...]) -> dict[str, list[str]]:
    """The heavy libraries that came with each module of one allowance; one process imports them all, one by one."""
    modules = [module for module, libraries in ALLOWED.items() if libraries == allowance]
    code = f"""
import importlib, json, sys
known = set()
for module in {modules}:
    importlib.import_module(module)
    print(json.dumps([module, [name for name in {HEAVY} if name in sys.modules and name not in known]]))
    known.update(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow  # an interpreter each
@pytest.mark.parametrize("module", ALLOWED)
def test_a_module_brings_in_only_the_heavy_libraries_it_may(module):
    assert set(brought_in(ALLOWED[module])[module]) <= set(ALLOWED[module])


@functools.cache
def imports(path: Path) -> set[str]:
    """The top modules (and mempipe subpackages) that a file names anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_ray_appears_only_in_the_files_that_are_for_it():
    places = {path.relative_to(ROOT / "mempipe").as_posix(): path for path in sources("mempipe")}
    found = [
        place
        for place, path in places.items()
        if "ray" in {name.split(".")[0] for name in imports(path)} or ".remote(" in path.read_text()
    ]
    assert len(found) > 10
    assert [place for place in found if not place.startswith(("actors/", "direct/", "serve/", "streams/"))] == []


PLACES = {
    "vllm": ("engines/generator.py", "engines/weights.py", "engines/vllm_"),
    "faiss": ("retrieval/",),
}
"""The starts of the paths, below mempipe/, of the files that may import a library (docs/architecture.md)."""

LAYERS = [
    {
        "types",
        "settings",
        "faults",
        "text",
        "spelling",
        "progress",
        "storage",
        "user_code",
        "installation",
        "http_client",
        "environment",
        "beacons",
        "garbage",
        "credentials",
        "facts",
        "moved",
    },
    {"rl"},
    {"data"},
    {"provenance"},
    {"agents", "retrieval", "masking"},
    {"request_seeds"},
    {"engines", "tracking"},
    {"config"},
    {"kinds"},
    {"loader", "rollout", "runs"},
    {"planning"},
    {"evaluation"},
    {"answers", "studies"},
    {"reports", "checks", "openai_api"},
    {"stop"},
    {"actors", "direct"},
    {"streams"},
    {"training", "serve"},
    {"doctor", "submission", "template", "pipelines"},
    {"api"},
    {"cli"},
    {"jobs", "__main__"},
]
"""Packages from the bottom up; a package imports those below its own, never one of its own layer."""


def package_of(name: str) -> str:
    return name.removeprefix("mempipe.").split(".")[0]


def test_the_table_of_the_docs_is_the_one_that_is_checked():
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.split("\n| package | content |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", line.split(" | ")[0]) for line in table.splitlines()]
    assert [set(row) for row in rows] == LAYERS[::-1]
    found = {path.name.removesuffix(".py") for path in (ROOT / "mempipe").iterdir()} - {"__init__", "__pycache__"}
    assert found | {"pipelines", "jobs"} == set().union(*LAYERS)


def test_a_package_imports_only_packages_below_it():
    assert [sentence for part in ("mempipe", "pipelines", "jobs") for sentence in upward_imports(part)] == []


@pytest.mark.parametrize("library", PLACES)
def test_a_library_occurs_only_in_its_places(library):
    """Imports inside functions and under TYPE_CHECKING count as well."""
    using = [
        path.relative_to(ROOT / "mempipe").as_posix()
        for path in sources("mempipe")
        if library in {name.split(".")[0] for name in imports(path)}
    ]
    assert using and [path for path in using if not path.startswith(PLACES[library])] == []


def upward_imports(part: str) -> list[str]:
    """What files of the part import that is not of a layer below their own."""

    def layer(package: str) -> int:
        return next(i for i, names in enumerate(LAYERS) if package in names)

    found = []
    for path in sources(part):
        own = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own == "__init__":
            continue
        for name in imports(path):
            other = package_of(name)
            if name.split(".")[0] not in ("mempipe", "pipelines", "jobs") or other in (own, "mempipe"):
                continue
            if not ({own, other} <= LAYERS[0] or layer(other) < layer(own)):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and under TYPE_CHECKING count as well."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sources("mempipe") + sources("pipelines")
    }
    graph = {name: imports(path) & files.keys() - {name} for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_no_package_holds_more_than_twelve_percent_of_the_lines():
    lines: collections.Counter[str] = collections.Counter()
    for path in sources("mempipe") + sources("pipelines") + sources("jobs"):
        lines[path.relative_to(ROOT).parts[1 if path.is_relative_to(ROOT / "mempipe") else 0]] += len(
            path.read_text().splitlines()
        )
    largest, count = lines.most_common(1)[0]
    assert count <= 0.12 * lines.total(), f"{largest} has {count} of {lines.total()} lines"


def test_promise_10_help_answers_in_under_a_second():
    """Of CPU time, which other work on the machine does not lengthen."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "mempipe", "--help"], capture_output=True, text=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and "train" in done.stdout
    assert min(seconds) < 1.0


@pytest.mark.slow  # an interpreter
def test_settings_and_plans_load_no_library_of_tables():
    modules = "mempipe.loader, mempipe.template, mempipe.planning.placement, mempipe.engines.learner_settings"
    code = f"import sys, {modules}; print(sorted({{'polars', 'pyarrow', 'pandas'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.slow  # an interpreter with torch
def test_the_first_tests_on_a_gpu_need_torch_and_transformers_alone():
    """A machine that is lent for an hour may have no more."""
    absent = [
        "ray",
        "vllm",
        "faiss",
        "polars",
        "pyarrow",
        "pandas",
        "mlflow",
        "sklearn",
        "fastapi",
        "mcp",
        "tenacity",
        "msgspec",
        "rich",
    ]
    selected = [
        "tests/gpu/test_learner_gpu.py",
        "tests/gpu/test_shapes_gpu.py",
        "-k",
        "updates and lora_rank and not 64",
    ]
    code = (
        "import sys, pytest, transformers.models.qwen2, transformers.generation\n"
        f"sys.modules |= dict.fromkeys({absent})\n"
        f"sys.exit(pytest.main(['-n', '0', '-p', 'no:cacheprovider', *{selected}]))"
    )
    environment = {**os.environ, "MEMPIPE_REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow  # an interpreter with Ray Data
def test_a_driver_loads_nothing_that_trains_or_samples():
    code = "import pipelines.train, sys; print(sorted({'torch', 'peft', 'vllm', 'mlflow'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_promise_10_a_config_that_cannot_work_is_refused_with_exit_code_2(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mempipe.cli",
        "train",
        str(ROOT / "jobs/configs/quickstart.yaml"),
        f"output={tmp_path}",
    ]
    done = subprocess.run([*command, "budget.context_tokens=64"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "budget.context_tokens is 64" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_two_test_files_share_a_name():
    """Pytest imports a test file by its bare name, and refuses the second one of the same name."""
    counts = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
