"""A chain of trainings: which model each stage begins with, and what MLflow is told of them. No training is started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from chain_setup import CONFIGS, tiny

from mempipe.agents.memsearcher import MemSearcherPrompts
from mempipe.agents.prompt_set import load_prompts
from mempipe.checks.chain import check_chain
from mempipe.cli import main as command
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.evaluation.suite import EvaluationSuite
from mempipe.loader import load_config, load_job, parse_section
from mempipe.provenance import model_sha256
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.studies.chain import ChainConfig, chain_runs, chain_table, check_stages, of_each_seed
from mempipe.tracking.tracker import Tracker, last_run_id
from pipelines import chain as pipeline
from pipelines.prepare import prepare


def test_every_stage_begins_with_the_model_that_the_one_before_left(tmp_path):
    runs = chain_runs(tiny(tmp_path))
    assert [run.name for run in runs] == ["memtrain", "memagent", "memagent-alone"]
    assert [run.agent.name for run in runs] == ["memtrain", "memagent", "memagent"]
    folder = tmp_path / "tiny-chain"
    assert [run.folder for run in runs] == [folder / run.name for run in runs]
    memtrain = folder / "memtrain"
    assert [run.model.path for run in runs] == ["", str(memtrain / "huggingface"), str(memtrain / "warm_start")]
    with_it, alone = (run.model_dump(exclude={"name", "model"}) for run in runs[1:])
    assert with_it == alone, "equal steps, equal everything"


@pytest.mark.parametrize("second", ["memagent", "memtrain"])
def test_stages_with_chunk_and_memory_in_different_orders_are_refused(tmp_path, second):
    stages = {
        "first": {"config": str(CONFIGS / "tiny_memtrain.yaml"), "settings": {"agent": {"chunk_first": True}}},
        "between": {"config": str(CONFIGS / "quickstart.yaml")},
        "last": {
            "config": str(CONFIGS / ("tiny_memtrain.yaml" if second == "memtrain" else "quickstart_memagent.yaml"))
        },
    }
    chain = parse_section({"output": str(tmp_path), "stages": stages}, ChainConfig)
    with pytest.raises(ConfigError, match=r"stages: last: agent.chunk_first is false, and first has true"):
        chain_runs(chain)
    stages["last"]["settings"] = {"agent": {"chunk_first": True}}
    assert len(chain_runs(parse_section({"output": str(tmp_path), "stages": stages}, ChainConfig))) == 5


@pytest.mark.parametrize("preset", sorted(path.name for path in CONFIGS.glob("*chain*.yaml")))
def test_presets_of_chains_have_one_layout(preset, monkeypatch):
    monkeypatch.chdir(CONFIGS.parents[1])
    _, chain = load_job(CONFIGS / preset, kind="chain")
    layouts = {getattr(run.agent, "chunk_first", None) for run in chain_runs(chain)} - {None}
    assert len(layouts) == 1


def test_the_later_stages_begin_without_the_first_where_the_first_began(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    stages = {
        "one": {
            "config": str(CONFIGS / "tiny_memtrain.yaml"),
            "settings": {"model": {"path": str(model)}, "warm_start": None},
        },
        "two": {"config": str(CONFIGS / "memagent_qwen2.5-7b.yaml")},
        "three": {"config": str(CONFIGS / "mem1_qwen2.5-7b.yaml"), "settings": {"num_steps": 7}},
    }
    chain = parse_section({"output": str(tmp_path), "name": "c", "stages": stages}, ChainConfig)
    runs = {run.name: run for run in chain_runs(chain)}
    begins = {name: run.model.path.removeprefix(f"{tmp_path}/") for name, run in runs.items()}
    assert begins == {
        "one": "model",
        "two": "c/one/huggingface",
        "three": "c/two/huggingface",
        "two-alone": "model",
        "three-alone": "c/two-alone/huggingface",
    }
    assert runs["three"].num_steps == runs["three-alone"].num_steps == 7
    assert [run.name for run in chain_runs(chain.model_copy(update={"compare": False}))] == ["one", "two", "three"]


def test_the_table_compares_the_last_stage_with_and_without_the_first(tmp_path):
    chain = tiny(tmp_path)
    suite = chain_table(chain, chain_runs(chain), chain.tracking)
    assert [run.name for run in suite.runs] == ["memagent", "memagent-alone"]
    assert [Path(run.config).name for run in suite.runs] == ["memagent", "memagent-alone"]
    assert suite.benchmarks[0].file == str(tmp_path / "tiny-chain" / "memagent" / "world" / "validation.parquet")


@pytest.mark.parametrize("asked", ["num_train_questions", "num_validation_questions"])
def test_a_world_with_too_few_questions_is_refused_by_the_setting_that_asks(asked, tmp_path):
    sizes = {"num_train_worlds": 1, "num_train_questions": 4, "num_validation_questions": 8} | {asked: 9000}
    settings = [f"world.{name}={value}" for name, value in sizes.items()]
    run = load_config(CONFIGS / "tiny_memtrain.yaml", [*settings, f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=rf"^world\.{asked}: 9000 questions of \d worlds .*too few .*chains"):
        prepare(Run(run))


def test_a_world_takes_the_model_that_it_is_given(tmp_path):
    world = ["world.num_train_worlds=1", "world.num_train_questions=4", "world.num_validation_questions=8"]
    model = tmp_path / "exported"
    run = load_config(CONFIGS / "tiny_memtrain.yaml", [*world, f"model.path={model}", f"output={tmp_path}"])
    made = prepare(Run(run))
    assert made.model.path == str(model) and not model.exists() and not (made.folder / "model").exists()
    questions = read_questions(made.data.train)
    assert all(question.recall_targets and question.context for question in questions)
    assert not any([q.golden_answers[0]] in q.recall_targets for q in questions)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages.memagent.settings.agent.nme": "x"}, "stages: memagent: agent.nme is not a setting"),
        ({"stages.evaluation.config": "c.yaml"}, "stages: evaluation is a folder of the chain itself"),
        ({"stages.memagent.config": "/nowhere.yaml"}, "stages: memagent: cannot read config /nowhere.yaml"),
        ({"stages": {"one": {"config": "c.yaml"}}}, "stages"),
        (
            {"benchmarks": [{"name": "nq"}, {"name": "nq"}]},
            "benchmarks: nq occurs twice; give one of them another name",
        ),
        ({"sampling.temprature": 1}, "sampling.temprature is not a setting; did you mean sampling.temperature"),
    ],
)
def test_a_wrong_chain_is_refused_by_name(changes, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent.parent)
    overrides = [f"output={tmp_path}", *(f"{name}={yaml.safe_dump(value).strip()}" for name, value in changes.items())]
    overrides = [override.removesuffix("\n...") for override in overrides]
    with pytest.raises(ConfigError, match=sentence):
        check_chain(load_job(CONFIGS / "tiny_chain.yaml", overrides, kind="chain")[1])


def trained(run: RunConfig, *, weights: str) -> None:
    """The folder of a run that has ended, with its export."""
    done = Run(run, resume="auto")
    done.check_inputs({"model.path": model_sha256(run.model.path)})
    export = run.folder / "huggingface"
    export.mkdir(parents=True, exist_ok=True)
    (export / "model.safetensors").write_text(weights)
    done.update(finished=True, num_steps=run.num_steps)


@pytest.fixture
def three_runs(tmp_path) -> tuple[ChainConfig, list[RunConfig]]:
    """Two stages that have ended, each from the model that the one before left, and the second without the first."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("base")
    first = {"config": str(CONFIGS / "tiny_memtrain.yaml"), "settings": {"world": None, "warm_start": None}}
    first["settings"] |= {"model": {"path": str(model)}, "data": {"train": "t"}}
    stages = {"one": first, "two": {"config": str(CONFIGS / "memagent_qwen2.5-7b.yaml")}}
    values = {"output": str(tmp_path), "name": "c", "stages": stages, "benchmarks": [{"name": "nq"}]}
    chain = parse_section(values, ChainConfig)
    runs = chain_runs(chain)
    for run in runs:
        trained(run, weights=run.name)
    check_stages(chain, runs)
    return chain, runs


def test_a_chain_that_was_interrupted_in_a_later_stage_goes_on(three_runs):
    chain, runs = three_runs
    Run(runs[1], resume="auto").update(finished=False, num_steps=1)
    begun = str(runs[1].folder)
    findings = [finding.text for finding in check_chain(chain) if begun in finding.text]
    assert findings == [f"stages: two: {begun} is resumed after step 1"]


@pytest.mark.parametrize("seeds", [[], [1, 2]])
def test_any_run_that_was_begun_otherwise_is_refused_before_the_first_one_starts(three_runs, seeds):
    """The comparison's run, and a run of the last seed, come after hours of training."""
    chain = three_runs[0].model_copy(update={"seeds": seeds})
    last = chain_runs(list(of_each_seed(chain).values())[-1])[0 if seeds else -1]
    shutil.rmtree(last.folder, ignore_errors=True)
    trained(last.model_copy(update={"seed": 99}), weights="w")
    with pytest.raises(
        ConfigError, match=rf"stages: {last.name}: .* was started with other settings.*: seed .* \(was 99\)"
    ):
        check_chain(chain)


def test_a_stage_whose_beginning_was_trained_again_is_refused(three_runs):
    chain, runs = three_runs
    trained(runs[0], weights="another seed, another run")
    with pytest.raises(ConfigError, match=r"stages: two was begun with .*one/huggingface, which was made again"):
        pipeline.main(chain)


def test_a_stage_is_not_kept_while_its_beginning_would_be_trained_again(three_runs):
    chain, runs = three_runs
    shutil.rmtree(runs[0].folder)
    with pytest.raises(ConfigError, match=r"stages: two was begun with .*, which is gone since; move .*/c/two away"):
        pipeline.main(chain)
    assert not runs[0].folder.exists(), "nothing was started"


def test_a_chain_is_no_training_run(capsys):
    assert command(["train", str(CONFIGS / "tiny_chain.yaml")]) == 2
    assert (
        "describes a chain of training stages, not a training run; `mempipe chain` takes it" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_stages_are_children_of_the_chain_in_mlflow_also_when_it_goes_on(tmp_path, monkeypatch):
    begun: list[tuple[str, str]] = []
    broken = True

    def train(run: RunConfig, *, resume: str) -> None:
        begun.append((run.name, resume))
        tracker = Tracker(run.tracking, folder=run.folder, run_name=run.name, run_config={})
        tracker.finish()
        if broken and run.name == "memagent":
            raise RuntimeError("killed")

    def evaluate(suite: EvaluationSuite) -> list[Path]:
        begun.append((suite.name, suite.tracking.parent_run_id))
        return []

    monkeypatch.setattr(pipeline.train, "main", train)
    monkeypatch.setattr(pipeline.evaluate, "main", evaluate)
    chain = tiny(tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        pipeline.main(chain)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    parent = last_run_id(chain.folder)
    assert parent is not None and client.get_run(parent).info.status == "FAILED"
    broken = False
    pipeline.main(chain)
    assert last_run_id(chain.folder) == parent and client.get_run(parent).info.status == "FINISHED"
    assert [name for name, _ in begun] == [
        "memtrain",
        "memagent",
        "memtrain",
        "memagent",
        "memagent-alone",
        "evaluation",
    ]
    assert {resume for name, resume in begun if name != "evaluation"} == {"auto"} and begun[-1] == (
        "evaluation",
        parent,
    )
    for name in ("memtrain", "memagent", "memagent-alone"):
        child = last_run_id(chain.folder / name)
        assert child is not None and client.get_run(child).data.tags["mlflow.parentRunId"] == parent


def test_the_shipped_chain_of_memsearcher_trains_and_tests_on_pairs(monkeypatch):
    """A training on single questions would not teach to answer two of them."""
    monkeypatch.chdir(Path(__file__).parents[2])
    chain = load_job("jobs/configs/chain_memtrain_memsearcher.yaml")[1]
    assert {each.objectives for each in chain.benchmarks} == {2}
    by_name = {run.name: run for run in chain_runs(chain)}
    for name in ("memsearcher", "memsearcher-alone"):
        run = by_name[name]
        assert {run.data.train, run.data.validation} == {
            "data/nq_hotpotqa_2_objectives.parquet",
            "data/nq_hotpotqa_dev_2_objectives.parquet",
        }
        assert (run.reward.answer, run.reward.wrong_answer) == ("objectives_em", 0.0)
        assert run.budget.max_turns == 2 * load_config("jobs/configs/memsearcher_qwen2.5-7b.yaml").budget.max_turns
        assert "separated by semicolons" in load_prompts(run.agent.prompts, MemSearcherPrompts).system
