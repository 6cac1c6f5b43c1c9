"""What is measured of a trained run that is named by its folder alone, and the commands that a run ends with."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from result_builders import answered

from examples.own_reward.reward import right_with_few_searches
from mempipe.answers.corpus import describe_corpus
from mempipe.cli import main
from mempipe.data.qa import write_questions
from mempipe.data.world import World, make_questions
from mempipe.evaluation.benchmarks import read_benchmark
from mempipe.evaluation.cells import Cell
from mempipe.evaluation.distribution import distribution_tables
from mempipe.evaluation.results import result_row
from mempipe.evaluation.suite import Bootstrap, resolve_run
from mempipe.loader import load_config, parse_config
from mempipe.reports import next_steps as steps
from mempipe.runs import Run
from mempipe.settings import ConfigError
from mempipe.studies.of_run import NUM_HELD_OUT, evaluation_of, sweep_of
from mempipe.types import Question

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "jobs" / "configs"
QUESTIONS = make_questions([World(seed, id=f"held-out-{seed}") for seed in range(2)], 12, seed=4)


def make_run(folder: Path, name: str = "quickstart", *overrides: str, finished: bool = True) -> Path:
    """What is read of a run's folder, without weights."""
    config = load_config(CONFIGS / f"{name}.yaml", [f"name={folder.name}", f"output={folder.parent}", *overrides])
    for made in ("huggingface", "warm_start", "index"):
        (folder / made).mkdir(parents=True)
    write_questions(folder / "world" / "validation.parquet", QUESTIONS)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "state.json").write_text(json.dumps({"finished": finished, "seconds": {}, "num_steps": 3}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "quick")


def test_a_run_is_compared_with_its_start_and_without_memory_and_search(run):
    suite = evaluation_of(str(run))
    assert [each.name for each in suite.runs] == ["trained", "warm start", "no memory", "no search"]
    configs = {each.name: resolve_run(suite, each) for each in suite.runs}
    paths = {name: Path(config.model.path).name for name, config in configs.items()}
    assert paths == dict.fromkeys(paths, "huggingface") | {"warm start": "warm_start"}
    assert {config.retrieval.index for config in configs.values()} == {str(run / "index")}
    (held_out,) = suite.benchmarks
    assert (held_out.file, held_out.num_questions) == (str(run / "world" / "validation.parquet"), NUM_HELD_OUT)
    assert (suite.name, suite.sampling.temperature) == ("quick", 0)


def test_a_run_that_was_moved_is_compared_with_the_model_that_it_made(tmp_path):
    run = make_run(tmp_path / "runs" / "quick", "quickstart", "warm_start=null")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["path"] = str(run / "model")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "warm_start").rmdir()
    (run / "model").mkdir()
    moved = run.rename(tmp_path / "moved")
    untrained = evaluation_of(str(moved)).runs[1]
    assert (untrained.name, untrained.checkpoint) == ("untrained", str(moved / "model"))


def test_a_run_with_held_out_relations_is_measured_on_them_and_the_gap_is_from_the_world(run):
    write_questions(run / "world" / "unseen_hops.parquet", QUESTIONS[:4])
    write_questions(run / "world" / "unseen_relations.parquet", QUESTIONS[4:])
    suite = evaluation_of(str(run))
    assert [each.name for each in suite.benchmarks] == ["world", "unseen_relations", "unseen_hops"]
    assert {each.num_questions for each in suite.benchmarks} == {NUM_HELD_OUT}
    cells = [
        Cell(
            run="trained",
            benchmark=benchmark,
            rows=[
                result_row(group, growing=False, prompt_hash="p") for group in answered([i < right for i in range(8)])
            ],
            trained_on={QUESTIONS[0].source: 4000},
        )
        for benchmark, right in zip(suite.benchmarks, (8, 4, 2), strict=True)
    ]
    (em, *_) = distribution_tables(cells, bootstrap=Bootstrap(num_resamples=100), seed=1)
    assert em.notes == ["trained: in distribution world; out of distribution unseen_relations, unseen_hops."]
    gap = em.rows[0].values[-1]
    assert gap.value == pytest.approx(1 - 6 / 16) and gap.is_bounded


def test_every_file_of_the_held_out_folder_is_a_set_of_the_evaluation(tmp_path):
    """Of a folder that is one set, the first questions are those of its first file."""
    folder = tmp_path / "dev"
    for name, part in (("nq", QUESTIONS[:6]), ("hotpotqa", QUESTIONS[6:])):
        write_questions(folder / f"{name}.parquet", part)
    run = make_run(tmp_path / "runs" / "mixed", "quickstart", "world=null", f"data.validation={folder}")
    for suite in (evaluation_of(str(run), ["num_questions=4"]), sweep_of(str(run), ["num_questions=4"])):
        asked = {each.name: [*read_benchmark(each, each.file)] for each in suite.benchmarks}
        assert asked == {"hotpotqa": QUESTIONS[6:10], "nq": QUESTIONS[:4]}
    (folder / "nq.parquet").unlink()
    (one,) = evaluation_of(str(run)).benchmarks
    assert (one.name, one.file) == ("held-out", str(folder))


def test_own_questions_are_all_asked_and_settings_may_follow(run, tmp_path):
    write_questions(tmp_path / "mine.parquet", QUESTIONS[:3])
    suite = evaluation_of(str(run), [str(tmp_path / "mine.parquet"), "num_samples=4", "sampling.temperature=0.7"])
    (mine,) = suite.benchmarks
    assert (suite.name, mine.name, mine.num_questions) == ("quick-mine", "mine", 0)
    assert (suite.num_samples, suite.sampling.temperature) == (4, 0.7)


def test_a_number_of_questions_holds_for_every_set_of_them(run, tmp_path):
    write_questions(tmp_path / "mine.parquet", QUESTIONS)
    own, held_out = [str(tmp_path / "mine.parquet"), "num_questions=2"], ["num_questions=2"]
    for suite in (evaluation_of(str(run), own), evaluation_of(str(run), held_out), sweep_of(str(run), held_out)):
        assert [benchmark.num_questions for benchmark in suite.benchmarks] == [2]
    with pytest.raises(ConfigError, match=r"num_questions is -1"):
        evaluation_of(str(run), ["num_questions=-1"])


def test_a_setting_of_the_run_holds_for_every_row(run, tmp_path):
    questions = str(tmp_path / "mine.parquet")
    write_questions(Path(questions), QUESTIONS[:3])
    words = [questions, "retrieval.index=my-index", "budget.max_turns=3", "num_samples=4"]
    for suite in (evaluation_of(str(run), words), sweep_of(str(run), words[:-1])):
        assert suite.benchmarks[0].file == questions
        assert all(
            each.settings == {"retrieval": {"index": "my-index"}, "budget": {"max_turns": 3}} for each in suite.runs
        )
    configs = [resolve_run(suite, each) for suite in [evaluation_of(str(run), words)] for each in suite.runs]
    assert {config.retrieval.index for config in configs} == {"my-index"} and configs[0].budget.max_turns == 3
    with pytest.raises(ConfigError, match="world is read by a training only; name a question file"):
        evaluation_of(str(run), ["world.hops=[1]"])
    for word in ("evaluation.num_questions=5", "algorithm.group_size=4"):
        for study in (evaluation_of, sweep_of):
            with pytest.raises(
                ConfigError, match=r"is read by a training only; the settings of an evaluation are num_questions"
            ):
                study(str(run), [word])
    with pytest.raises(ConfigError, match=r"budget\.max_turn is not a setting; did you mean budget\.max_turns"):
        suite = evaluation_of(str(run), ["budget.max_turn=3"])
        resolve_run(suite, suite.runs[0])


def test_an_agent_is_not_measured_without_what_it_never_had(tmp_path):
    react = evaluation_of(str(make_run(tmp_path / "react", "quickstart_react")))
    assert [each.name for each in react.runs] == ["trained", "warm start", "no search"]
    reader = evaluation_of(str(make_run(tmp_path / "reader", "quickstart_memagent")))
    assert [each.name for each in reader.runs] == ["trained", "warm start", "no memory"]


def test_without_a_warm_start_the_model_as_it_came_is_the_start(tmp_path):
    run = make_run(tmp_path / "own", "quickstart", "world=null", "warm_start=null", "model.path=models/base")
    (run / "warm_start").rmdir()
    suite = evaluation_of(str(run), [str(run / "world" / "validation.parquet")])
    assert [each.checkpoint for each in suite.runs] == ["", "models/base", "", ""]
    assert suite.runs[1].name == "untrained"
    with pytest.raises(ConfigError, match=r"has no held-out questions \(data\.validation is empty\)"):
        evaluation_of(str(run))


def make_own_run(folder: Path) -> Path:
    """A run whose held-out questions have fields that only `data.columns` names."""
    file = folder.parent / "fragen.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"Frage": "Capital of Peru?", "Lösung": {"short": ["Lima"]}}) + "\n")
    columns = "data.columns={question: Frage, answer: Lösung.short}"
    given = ["world=null", "warm_start=null", "model.path=models/base", f"data.validation={file}", columns]
    return make_run(folder, "quickstart", *given)


def test_held_out_questions_are_read_by_the_fields_that_the_run_names(tmp_path):
    run = make_own_run(tmp_path / "runs" / "own")
    (benchmark,) = evaluation_of(str(run)).benchmarks
    assert next(read_benchmark(benchmark, benchmark.file)).golden_answers == ["Lima"]
    (swept,) = sweep_of(str(run)).benchmarks
    assert swept.columns == benchmark.columns
    (other,) = evaluation_of(str(run), [str(run / "world" / "validation.parquet")]).benchmarks
    assert not other.columns.named
    offered = describe_corpus(load_config(run / "config.yaml"), searches=True, partition=None)
    assert [each.golden_answers for each in offered.examples] == [["Lima"]]


def test_the_commands_after_a_run_ask_a_question_that_its_fields_hold(tmp_path):
    run = make_own_run(tmp_path / "runs" / "own")
    assert f'mempipe ask {run} "Capital of Peru?"' in [command for command, _ in asked_of(run)]
    (run.parent / "fragen.jsonl").write_text("damaged")
    assert f"mempipe serve {run}" in [command for command, _ in asked_of(run)]


def asked_of(run: Path) -> list[tuple[str, str]]:
    said = steps.next_steps(run, {"num_steps": 30, "output": str(run.parent)})
    return [(re.sub(r"^\S*mempipe", "mempipe", command), meaning) for command, meaning in said]


def make_model(folder: Path, *, agent: dict[str, Any] | None = None) -> Path:
    """What is read of a model's folder; `agent` are the settings of an exported one."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if agent is not None:
        (folder / "mempipe.yaml").write_text(yaml.safe_dump(agent))
    return folder


def test_a_model_is_measured_on_own_questions_with_the_settings_that_are_named(tmp_path):
    model, questions = make_model(tmp_path / "smollm2"), str(tmp_path / "mine.parquet")
    write_questions(Path(questions), QUESTIONS[:3])
    words = [questions, "retrieval.index=my-index", "agent.prompts=compact"]
    suite = evaluation_of(str(model), words)
    assert [each.name for each in suite.runs] == ["smollm2", "no memory", "no search"]
    configs = [resolve_run(suite, each) for each in suite.runs]
    assert {config.model.path for config in configs} == {str(model)}
    assert {(config.retrieval.index, config.agent.prompts) for config in configs} == {("my-index", "compact")}
    react = evaluation_of(str(model), [*words[:2], "agent.name=react"])
    assert [each.name for each in react.runs] == ["smollm2", "no search"], "it has no memory"
    assert [each.checkpoint for each in sweep_of(str(model), words).runs] == [str(model)]


def test_an_exported_agent_is_measured_with_its_own_settings(tmp_path):
    agent = {"agent": {"prompts": "tiny"}, "budget": {"memory_tokens": 48}}
    exported, questions = make_model(tmp_path / "exported", agent=agent), str(tmp_path / "mine.parquet")
    write_questions(Path(questions), QUESTIONS[:3])
    suite = evaluation_of(str(exported), [questions, "retrieval.index=my-index"])
    config = resolve_run(suite, suite.runs[0])
    assert (config.agent.prompts, config.budget.memory_limit) == ("tiny", 48)
    assert max(sweep_of(str(exported), [questions]).budgets) == 48


def test_a_folder_from_elsewhere_starts_no_program(tmp_path):
    ran = tmp_path / "ran"
    server = {"command": "touch", "args": [str(ran)]}
    exported = make_model(tmp_path / "exported", agent={"agent": {"prompts": "tiny", "mcp_servers": [server]}})
    write_questions(tmp_path / "mine.parquet", QUESTIONS[:3])
    words = [str(tmp_path / "mine.parquet"), "retrieval.index=my-index"]
    with pytest.raises(ConfigError, match=r"mempipe\.yaml: agent\.mcp_servers starts the command 'touch'"):
        evaluation_of(str(exported), words)
    suite = evaluation_of(str(exported), [*words, f"agent.mcp_servers=[{json.dumps(server)}]"])
    assert resolve_run(suite, suite.runs[0]).agent.model_dump()["mcp_servers"][0]["command"] == "touch"
    assert not ran.exists()


def test_a_folder_from_elsewhere_starts_no_command_as_its_program(tmp_path):
    program = {"agent": {"name": "program", "program": ["touch", str(tmp_path / "ran")]}}
    exported = make_model(tmp_path / "exported", agent=program)
    write_questions(tmp_path / "mine.parquet", QUESTIONS[:3])
    words = [str(tmp_path / "mine.parquet"), "retrieval.index=my-index"]
    with pytest.raises(ConfigError, match=r"mempipe\.yaml: agent\.program starts the command 'touch'"):
        evaluation_of(str(exported), words)
    suite = evaluation_of(str(exported), [*words, "agent.program=[sh, mine.sh]"])
    assert resolve_run(suite, suite.runs[0]).agent.model_dump()["program"] == ["sh", "mine.sh"]


def test_a_run_is_swept_over_shares_of_its_memory(run, tmp_path):
    sweep = sweep_of(str(run))
    assert (sweep.budgets, [each.name for each in sweep.runs], sweep.name) == ([4, 8, 16, 32, 64], ["trained"], "quick")
    assert sweep_of(str(run), ["budgets=[5]"]).budgets == [5]
    with pytest.raises(ConfigError, match=r"'react', which has no budget\.memory_tokens"):
        sweep_of(str(make_run(tmp_path / "react", "quickstart_react")))


def test_a_sweep_of_a_run_that_is_to_be_trained_needs_its_file(run):
    with pytest.raises(ConfigError, match="with train every run has a config, a training run's YAML file"):
        sweep_of(str(run), ["train=true"])


def test_the_fields_of_a_question_file_are_named_as_its_refusal_says(run, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"query": "Who?", "my_label": "Ann"}\n')
    (asked,) = evaluation_of(str(run), [str(file)]).benchmarks
    with pytest.raises(ConfigError, match=r"set data.columns.answer .*it is `columns` of the benchmark"):
        list(read_benchmark(asked, asked.file))
    for study in (evaluation_of, sweep_of):
        suite = study(str(run), [str(file), "data.columns.answer=my_label"])
        (asked,) = suite.benchmarks
        assert [question.golden_answers for question in read_benchmark(asked, asked.file)] == [["Ann"]]
        assert resolve_run(suite, suite.runs[0]).data.columns.answer == "", "they are no setting of the run"


def test_the_held_out_questions_are_read_with_the_fields_of_the_run(tmp_path):
    run = make_run(tmp_path / "runs" / "quick")
    file = tmp_path / "mine.jsonl"
    file.write_text('{"query": "Who?", "my_label": "Ann"}\n')
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"world": None, "warm_start": None}
    config["data"] |= {"train": str(file), "validation": str(file), "columns": {"answer": "my_label"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (asked,) = evaluation_of(str(run)).benchmarks
    assert [question.golden_answers for question in read_benchmark(asked, asked.file)] == [["Ann"]]


def test_a_question_file_whose_name_is_only_an_ending_has_a_set_with_a_name(run, tmp_path):
    write_questions(tmp_path / ".parquet", QUESTIONS[:3])
    suite = evaluation_of(str(run), [str(tmp_path / ".parquet")])
    assert (suite.name, suite.benchmarks[0].name) == ("quick-questions", "questions")


@pytest.mark.parametrize("command", ["evaluate", "sweep"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["RUN", "nowhere.jsonl"], "the question file nowhere.jsonl does not exist"),
        (["RUN", "a.jsonl", "b.jsonl"], "'b.jsonl' is neither key=value nor the question file"),
        (["RUN", "sampling.temprature=1"], "did you mean sampling.temperature"),
        (["RUN/index"], "index holds no run (config.yaml) and no model (config.json); give the folder of a run or"),
        (["MODEL"], "has no held-out questions (data.validation is empty); name a question file after the folder"),
        (["UNFINISHED"], "is an unfinished run (3 steps are done"),
        (["nowhere"], "cannot read config nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(run, tmp_path, capsys, command, words, reason):
    unfinished = make_run(tmp_path / "unfinished", finished=False)
    (unfinished / "huggingface").rmdir()
    model = make_model(tmp_path / "model")
    names = {"RUN": run, "UNFINISHED": unfinished, "MODEL": model}
    words = [re.sub("[A-Z]{3,}", lambda found: str(names[found.group()]), word) for word in words]
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert reason in said and "Traceback" not in said


def test_the_commands_after_a_run_name_it_and_a_question_that_it_can_answer(run, monkeypatch):
    monkeypatch.setattr(steps.shutil, "which", lambda name: f"{Path(sys.prefix) / 'bin' / name}")
    commands = dict(steps.next_steps(run, {"num_steps": 30, "output": str(run.parent)}))
    words = [shlex.split(command) for command in commands]
    assert [each[1] for each in words] == ["ask", "serve", "trace", "evaluate", "sweep", "train", "ui"]
    assert {each[0] for each in words} == {"mempipe", "mlflow"}
    (asked,) = [question for question in QUESTIONS if question.text == words[0][3]][:1]
    assert (words[0][2], asked.partition) == (str(run), "held-out-0")
    assert next(iter(commands.values())) == f"ask it; the right answer is {asked.golden_answers[0]}"
    assert f'"{asked.text}"' in next(iter(commands))
    assert words[5][2:] == [f"{run}/config.yaml", "num_steps=60", "--resume"]


def test_a_program_is_named_by_its_path_where_the_shell_does_not_find_it(tmp_path, monkeypatch):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "mempipe").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path)
    for found in (None, "/usr/bin/mempipe"):
        monkeypatch.setattr(steps.shutil, "which", lambda name, found=found: found)
        assert steps.program() == ".venv/bin/mempipe"
    monkeypatch.setattr(steps.shutil, "which", lambda name: str(tmp_path / ".venv" / "bin" / name))
    assert steps.program() == "mempipe"


def test_config_yaml_names_what_the_run_made_and_goes_on_from_it(tmp_path):
    config = load_config(CONFIGS / "quickstart.yaml", [f"output={tmp_path}"])
    run = Run(config)
    folder = run.folder
    made = {
        "model": config.model.model_copy(update={"path": str(folder / "model")}),
        "retrieval": config.retrieval.model_copy(update={"index": str(folder / "index")}),
        "data": config.data.model_copy(
            update={name: str(folder / "world" / f"{name}.parquet") for name in ("train", "validation")}
        ),
    }
    run.resolved(config.model_copy(update=made))
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["model"]["path"] == str(folder / "model") and written["retrieval"]["index"] == str(folder / "index")
    assert written["data"]["validation"] == str(folder / "world" / "validation.parquet")
    assert load_config(folder / "config.yaml") == config
    elsewhere = parse_config(written | {"name": "other"})
    assert elsewhere.model.path == str(folder / "model")  # of another run, which is a model like any other
    Run(config, resume="auto")  # a finished run has nothing to do, and is not prepared again
    assert yaml.safe_load((folder / "config.yaml").read_text()) == written


def test_the_example_of_an_own_reward_is_the_quickstart_from_its_warm_start():
    example = load_config(ROOT / "examples" / "own_reward" / "config.yaml").model_dump()
    quickstart = load_config(CONFIGS / "quickstart.yaml").model_dump()
    differing = {name for name in example if example[name] != quickstart[name]}
    of_its_own = {"name", "num_steps", "reward", "evaluation", "checkpoint"}
    assert differing - of_its_own == {"model", "retrieval", "data", "world", "warm_start"}
    assert example["retrieval"] == quickstart["retrieval"] | {"index": "runs/quickstart/index"}
    assert example["model"] == quickstart["model"] | {"path": "runs/quickstart/warm_start"}


@pytest.mark.parametrize(
    ("answer", "searches", "reward"), [("Oslo", 2, 0.9), (" Oslo\n", 1, 0.95), ("Bergen", 1, -0.05), (None, 0, 0.0)]
)
def test_the_example_pays_for_right_answers_and_takes_for_searches(answer, searches, reward):
    question = Question(id="q", text="?", golden_answers=["Oslo"])
    contexts = [SimpleNamespace(searches=["a search"]) for _ in range(searches)]
    attempt: Any = SimpleNamespace(answer=answer, contexts=contexts)
    assert right_with_few_searches(attempt, question) == {
        "reward": pytest.approx(reward),
        "right": float(reward > 0),
        "searches": searches,
    }
