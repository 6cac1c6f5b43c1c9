"""`import mempipe`: agents that are loaded, asked and measured in this process, with a scripted engine."""

from __future__ import annotations

import asyncio
import datetime
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import yaml
from api_builders import STEPS, build_run, questions_in, scripted_engines
from trace_builders import write_full_history_run, write_run

import mempipe
from mempipe import cli
from mempipe.agents.prompt_set import BUILT_IN
from mempipe.api.evaluation import questions_of
from mempipe.cli.serve import _service_settings
from mempipe.engines.engine_faults import GenerationTimeout
from mempipe.evaluation.causes import Cause
from mempipe.faults import InfrastructureFault
from mempipe.provenance import MADE_OF, write_record
from mempipe.reports.agent_folder import agent_files
from mempipe.storage.json_files import write_object
from mempipe.types import EndReason

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return build_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def questions(run):
    return questions_in(run)


@pytest.fixture
def engines(run, questions, monkeypatch):
    return scripted_engines(monkeypatch, [question.text for question in questions])


@pytest.fixture
def agent(run, engines):
    with mempipe.load(run) as agent:
        yield agent


def test_importing_mempipe_imports_nothing_but_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import mempipe; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['mempipe']", done.stdout + done.stderr


def test_every_public_name_is_there_and_says_what_it_is():
    for name in mempipe.__all__:
        assert getattr(mempipe, name)
        assert name == "__version__" or getattr(mempipe, name).__doc__
    assert set(mempipe.__all__) <= set(dir(mempipe))
    assert mempipe.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="'mempipe' has no attribute 'trian'"):
        mempipe.trian  # noqa: B018


def test_a_question_is_answered_with_its_turns_and_its_memory(agent, questions):
    question = next(each for each in questions if each.num_hops > 1)
    turns = []
    reply = agent.ask(question.text, partition=question.partition, on_turn=turns.append)
    assert str(reply).strip() == question.golden_answers[0]
    assert reply.end_reason == "answered" and reply.turns == turns
    assert len(turns) == question.num_hops + 1
    assert reply.memory_by_turn[0] == "known nothing" and len(set(reply.memory_by_turn)) == len(turns)
    assert reply.tokens == reply.prompt_tokens + reply.completion_tokens > 0
    assert reply.table["memory_tokens"].to_list() == [turn.memory_tokens for turn in turns]
    assert reply.trace.count("passage  ") == 2 * question.num_hops
    assert repr(reply) == f"<Reply: {reply.summary}>" and f"{len(turns)} turns" in reply.summary
    assert question.text.split()[-1][:-1] in reply.memory  # what a session would keep


def test_every_end_of_an_attempt_is_said_in_words():
    assert all(reason.sentence.startswith(("it ", "its ", "a ")) for reason in EndReason)


def test_a_notebook_shows_texts_as_texts(agent, engines, questions):
    engines.started[0].says = ["<b>x</b></think>\\boxed{<script>alert(1)</script>}"]
    page = agent.ask(questions[0].text)._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page and "&lt;b&gt;" in page


def test_the_memory_of_a_reply_is_what_the_next_question_starts_from(agent, questions):
    first = agent.ask(questions[0].text, partition=questions[0].partition)
    second = agent.ask(questions[1].text, partition=questions[1].partition, memory="known nothing\nOslo")
    assert first.memory and second.memory_by_turn[0] == "known nothing\nOslo"


@pytest.mark.parametrize(
    ("options", "searched"), [({}, "own"), ({"partition": None}, "own"), ({"partition": ""}, "all")]
)
def test_a_question_without_a_partition_is_about_that_of_the_agent(agent, questions, monkeypatch, options, searched):
    search, asked = agent._answering._search, set()

    async def noting(query, *, num_passages, partition):
        asked.add(partition)
        return await search(query, num_passages=num_passages, partition=partition)

    monkeypatch.setattr(agent._answering, "_search", noting)
    agent.ask(questions[0].text, **options)
    assert agent.partition and asked == {{"own": agent.partition, "all": ""}[searched]}


def test_questions_are_asked_together_and_from_an_event_loop(agent, questions):
    texts = [question.text for question in questions]
    together = agent.ask_many(texts)
    assert [reply.question for reply in together] == texts

    async def both():
        return await asyncio.gather(*(agent.ask_async(text) for text in texts[:2]))

    assert [reply.answer for reply in asyncio.run(both())] == [reply.answer for reply in together[:2]]
    assert agent.ask_many([]) == []


async def test_a_notebook_may_ask_and_measure_although_an_event_loop_runs_in_it(run, engines, questions):
    with mempipe.load(run) as agent:
        assert agent.ask(questions[0].text, partition=questions[0].partition).answer
        assert mempipe.evaluate(agent, questions[:2]).interval().value == 1.0
        assert mempipe.sweep(agent, questions[:2], memory_tokens=[32, 64]).table.height == 2


REFUSED = {
    "question is ''": {"question": ""},
    "question is 3": {"question": 3},
    "memory is 3; it is a text": {"question": "x", "memory": 3},
    "partition 'nowhere' is none of the index's": {"question": "What is Ada's hometown?", "partition": "nowhere"},
    "num_samples is 2 at temperature 0": {"question": "x", "num_samples": 2},
    "budget.colour is not a field": {"question": "x", "budget": {"colour": 1}},
    "budget.max_turns is 65, more than the 64": {"question": "x", "budget": {"max_turns": 65}},
    "sampling.temperature is -1": {"question": "x", "sampling": {"temperature": -1}},
    "colour is not a field": {"question": "x", "colour": "red"},
    "more than budget.question_tokens 32": {"question": "x " * 200},
    "agent 'memsearcher' searches; it reads no text": {"question": "x", "text": "y"},
}


@pytest.mark.parametrize(("message", "asked"), REFUSED.items(), ids=list(REFUSED))
def test_a_question_that_cannot_work_is_refused_in_a_sentence(agent, engines, questions, message, asked):
    engines.started[0].texts = []
    engines.started[0].says = [
        "search</think>" + '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "a"}}</tool_call>'
    ]
    with pytest.raises(mempipe.ConfigError) as error:
        agent.ask(**asked)
    assert message in str(error.value)


def test_one_bad_question_of_many_is_raised_as_itself(agent, questions):
    with pytest.raises(mempipe.ConfigError, match="question is ''"):
        agent.ask_many([questions[0].text, ""])
    with pytest.raises(mempipe.ConfigError, match="`ask` takes a single one"):
        agent.ask_many(questions[0].text)


def test_a_fault_of_the_engine_is_no_answer(agent, engines, questions):
    engines.started[0].fault = GenerationTimeout("no completion within generation.timeout_s 600 s")
    with pytest.raises(InfrastructureFault, match=r"generation\.timeout_s 600 s"):
        agent.ask(questions[0].text)
    with pytest.raises(InfrastructureFault, match=r"generation\.timeout_s 600 s"):
        mempipe.evaluate(agent, questions)


def test_a_closed_agent_has_ended_its_engine_and_says_so(run, engines, questions):
    with mempipe.load(run) as agent:
        assert engines.num_ended == 0
    assert engines.num_ended == 1 and "closed" in repr(agent)
    agent.close()
    assert engines.num_ended == 1
    with pytest.raises(mempipe.ConfigError, match="'quickstart' is closed"):
        agent.ask(questions[0].text)


def test_an_agent_that_nobody_holds_ends_its_engine(run, engines):
    mempipe.load(run)
    assert engines.num_ended == 1


def test_an_engine_that_cannot_start_leaves_no_thread_behind(run, monkeypatch):
    import threading

    from mempipe.api import roles

    def broken(config, tokenizer):
        raise RuntimeError("no memory")

    monkeypatch.setattr(roles, "_engine", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        mempipe.load(run)
    assert not any(thread.name == "mempipe-agent" for thread in threading.enumerate())


def test_settings_of_the_run_are_replaced_nested_or_with_dots(run, engines):
    with mempipe.load(run, budget={"max_turns": 3}, **{"retrieval.num_passages": 1}) as agent:
        assert agent.config.budget.max_turns == 3 and agent.config.retrieval.num_passages == 1
        assert agent.config.budget.memory_tokens == 64  # what was not named stays


def test_an_agent_samples_as_it_was_loaded_and_a_question_may_say_otherwise(run, engines, questions):
    with mempipe.load(run) as greedy, mempipe.load(run, sampling={"temperature": 0.7, "top_p": 0.9}) as drawn:
        greedy.ask(questions[0].text)
        drawn.ask(questions[0].text)
        drawn.ask(questions[0].text, sampling={"temperature": 0.2})
    first, second = ({(each.temperature, each.top_p) for each in engine.samplings} for engine in engines.started)
    assert first == {(0.0, 1.0)} and second == {(0.7, 0.9), (0.2, 0.9)}


def test_a_model_is_loaded_with_an_index(run, engines, questions):
    settings = {"agent.prompts": "tiny", "budget": {"question_tokens": 32, "context_tokens": 512, "action_tokens": 32}}
    settings["budget"] |= {"observation_tokens": 96, "memory_tokens": 64, "memory_message_tokens": 68}
    with mempipe.load(run / "huggingface", index=run / "index", **settings) as agent:
        reply = agent.ask(questions[0].text, partition=questions[0].partition)
    assert str(reply).strip() == questions[0].golden_answers[0]


def test_an_index_takes_the_place_of_a_service(run, engines, questions, tmp_path):
    served = yaml.safe_load((run / "config.yaml").read_text())
    served |= {"world": None, "retrieval": served["retrieval"] | {"index": "", "url": "http://127.0.0.1:1"}}
    served["model"]["path"] = str(run / "huggingface")
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(served))
    with mempipe.load(tmp_path / "served.yaml", index=run / "index") as agent:
        reply = agent.ask(questions[0].text, partition=questions[0].partition)
    assert str(reply).strip() == questions[0].golden_answers[0]
    words = ["serve", str(tmp_path / "served.yaml"), "--index", str(run / "index")]
    settings = _service_settings(cli._parsed(words))["settings"]
    assert settings["retrieval"] == {"url": "", "index": str(run / "index")}


@pytest.fixture
def exported(run, tmp_path) -> Path:
    """The exported agent of the run, by the command."""
    best = run / "best"
    shutil.copytree(run / "huggingface", best)
    write_record(best / MADE_OF, {"step": 3})
    try:
        assert cli.main(["export", str(run), str(tmp_path / "agent"), "--best"]) == 0
    finally:
        shutil.rmtree(best)
    return tmp_path / "agent"


def test_an_exported_folder_is_a_whole_agent(run, exported, engines, questions):
    with mempipe.load(exported, index=run / "index") as agent:
        reply = agent.ask(questions[0].text, partition=questions[0].partition)
        assert agent.config.budget == mempipe.Run(run).config.budget
    assert str(reply).strip() == questions[0].golden_answers[0]
    card = (exported / "README.md").read_text()
    assert "| after | 3 | 12 | 1.000 (0.758 to 1.000) |" in card and "memory has at most 64 tokens" in card
    assert str(run.parent) not in card + (exported / "mempipe.yaml").read_text()


def test_prompts_of_a_file_go_with_the_agent(run, exported, engines, questions, tmp_path):
    prompts = tmp_path / "mine.yaml"
    prompts.write_text((BUILT_IN / "tiny.yaml").read_text())
    copied = shutil.copytree(run, tmp_path / "run")
    settings = yaml.safe_load((copied / "config.yaml").read_text())
    settings["agent"]["prompts"] = str(prompts)
    (copied / "config.yaml").write_text(yaml.safe_dump(settings))
    for name, text in agent_files(copied, step=3).items():
        (exported / name).write_text(text)
    prompts.unlink()
    with mempipe.load(exported, index=run / "index") as agent:
        assert agent.config.agent.prompts == str(exported / "prompts.yaml")
        reply = agent.ask(questions[0].text, partition=questions[0].partition)
    assert str(reply).strip() == questions[0].golden_answers[0]
    with pytest.raises(mempipe.ConfigError, match="which cannot be read: No such file"):
        agent_files(copied, step=3)


def test_a_model_card_names_the_text_of_the_training_questions(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "cloze").mkdir()
    write_object(copied / "cloze" / "cloze.json", {"source": "leads of articles, licence CC BY-SA 4.0"})
    card = agent_files(copied, step=3)["README.md"]
    assert "training data hold. Its questions were created from leads of articles, licence CC BY-SA 4.0." in card
    assert "were created from" not in agent_files(run, step=3)["README.md"]


def test_a_model_card_says_how_its_answers_were_sampled(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    assert "one attempt each (greedy); exact match" in agent_files(copied, step=3)["README.md"]
    settings = yaml.safe_load((copied / "config.yaml").read_text())
    settings["evaluation"]["temperature"] = 0.7
    (copied / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "one attempt each (temperature 0.7); exact match" in agent_files(copied, step=3)["README.md"]


UNLOADABLE = {
    "does not exist; give the folder of a run": ("nowhere/at/all", {}),
    "an endpoint is given as {'url': 'http://127.0.0.1:1/v1'": ("http://127.0.0.1:1/v1", {}),
    "retrieval.index": ("RUN", {"index": "no-index"}),
    "budget.max_turn is not a setting; did you mean budget.max_turns?": ("RUN", {"budget": {"max_turn": 3}}),
    "endpoint.url is missing": ({"model": "m"}, {}),
    "endpoint without tokenizer": ({"url": "http://127.0.0.1:1/v1", "model": "m"}, {}),
    "sampling.temperature is -1": ("RUN", {"sampling": {"temperature": -1}}),
    "reward.function is 3": ("RUN", {"reward": {"function": 3}}),
}


@pytest.mark.parametrize(("message", "source"), UNLOADABLE.items(), ids=list(UNLOADABLE))
def test_what_cannot_be_loaded_is_refused_in_a_sentence_before_anything_starts(run, engines, message, source):
    where, settings = source
    with pytest.raises(mempipe.ConfigError) as error:
        mempipe.load(run if where == "RUN" else where, **settings)
    assert message in str(error.value) and not engines.started


def test_an_evaluation_counts_what_is_right_and_shows_what_is_wrong(agent, engines, questions):
    right = mempipe.evaluate(agent, questions)
    assert right.table["em"].to_list() == [1.0] * len(questions) and right.failures().is_empty()
    assert right.table["id"].to_list() == [question.id for question in questions]
    engines.started[0].says = ["answer</think>\\boxed{ nobody}"] * 3
    worse = mempipe.evaluate(agent, questions)
    assert worse.failures()["answer"].str.strip_chars().to_list() == ["nobody"] * 3
    assert worse.interval("em").value == pytest.approx(1 - 3 / len(questions))
    printed = str(right.compare(worse))
    assert all(f"┆ {name} " in printed for name in ("difference", "low", "high", "p_value"))
    compared = right.compare(worse).row(0, named=True)
    assert (compared["gained"], compared["lost"], compared["num_shared"]) == (0, 3, len(questions))
    assert compared["difference"] == pytest.approx(-3 / len(questions))
    wrong = worse.failures()["id"][0]
    assert "answer ' nobody'" in worse.transcript(wrong)
    with pytest.raises(mempipe.ConfigError, match="which no question"):
        worse.transcript("nobody")
    with pytest.raises(mempipe.ConfigError, match="the metrics are em"):
        worse.interval("colour")
    with pytest.raises(mempipe.ConfigError, match="the metrics are em"):
        worse.failures("colour")
    summary = dict(zip(worse.summary["metric"], worse.summary["mean"], strict=True))
    assert summary["em"] == pytest.approx(1 - 3 / len(questions))


def test_questions_come_from_a_file_or_from_rows(agent, run, questions):
    of_file = mempipe.evaluate(agent, run / "world" / "validation.parquet", num_questions=2)
    assert of_file.table["id"].to_list() == [question.id for question in questions[:2]]
    rows = [
        {"id": "a", "question": questions[0].text, "golden_answers": questions[0].golden_answers},
    ]
    assert mempipe.evaluate(agent, rows).table["golden_answers"].to_list() == [questions[0].golden_answers]
    odd = [{"ask": questions[0].text, "gold": questions[0].golden_answers[0]}]
    named = mempipe.evaluate(agent, odd, columns={"question": "ask", "answer": "gold"})
    assert named.table["golden_answers"].to_list() == [questions[0].golden_answers]


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        (np.float32(0.1), ["0.1"]),
        (np.int64(3), ["3"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (pl.Series(["a", "b"]), ["a", "b"]),
        (datetime.date(2020, 1, 2), ["2020-01-02"]),
    ],
)
def test_rows_may_hold_values_of_numpy_and_dates(answer, golden):
    (question,) = questions_of([{"question": "Who?", "answer": answer}], num_questions=0)
    assert question.golden_answers == golden


def test_a_frame_and_a_single_mapping_are_rows():
    row = {"question": "Who?", "answer": "Ann"}
    for given in (pl.DataFrame([row]), row):
        (question,) = questions_of(given, num_questions=0)
        assert (question.text, question.golden_answers) == ("Who?", ["Ann"])


def test_a_frame_of_pandas_holds_rows_and_empty_cells():
    frame = pd.DataFrame({"question": ["Who?", "When?"], "answer": ["Ann", 3], "aliases": [["Anne", "Anna"], None]})
    who, when = questions_of(frame, num_questions=0)
    assert (who.text, who.golden_answers) == ("Who?", ["Ann", "Anne", "Anna"])
    assert (when.text, when.golden_answers) == ("When?", ["3"])
    missing = pd.DataFrame({"question": ["Who?", "When?"], "answer": ["Ann", "now"], "context": ["Ann", float("nan")]})
    assert [each.context for each in questions_of(missing, num_questions=0)] == ["Ann", ""]


BAD_QUESTIONS = {
    "questions is an empty list": ([], {}),
    "questions is a list of str": (["What?"], {}),
    "questions is None; expected a file": (None, {}),
    "answer is True, which may mean": ([{"question": "Who?", "answer": np.bool_(True)}], {}),
    "expected a whole number from 1, or 0 for all": ("FILE", {"num_questions": -1}),
    "num_questions is None": ("FILE", {"num_questions": None}),
    "num_samples is 0": ("FILE", {"num_samples": 0}),
    "num_samples is None": ("FILE", {"num_samples": None}),
    "temperature is '0'": ("FILE", {"temperature": "0"}),
    "num_samples is 2 at temperature 0": ("FILE", {"num_samples": 2}),
    "temperature is -1": ("FILE", {"temperature": -1}),
    "colour is not a setting": ("FILE", {"columns": {"colour": "red"}}),
    "control is 'no_hands'": ("FILE", {"control": "no_hands"}),
    "nowhere.jsonl": ("nowhere.jsonl", {}),
    "questions": ([{"colour": "red"}], {}),
    "JSON cannot hold": ([{"question": object()}], {}),
}


@pytest.mark.parametrize(("message", "asked"), BAD_QUESTIONS.items(), ids=list(BAD_QUESTIONS))
def test_an_evaluation_that_cannot_work_is_refused(agent, run, message, asked):
    what, options = asked
    with pytest.raises(mempipe.ConfigError) as error:
        mempipe.evaluate(agent, run / "world" / "validation.parquet" if what == "FILE" else what, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("loaded", [{}, {"partition": ""}], ids=["own", "all"])
def test_a_question_without_a_partition_is_measured_in_that_of_the_agent(run, engines, questions, monkeypatch, loaded):
    with mempipe.load(run, **loaded) as agent:
        search, asked = agent.roles.search, set()

        async def noting(query, *, num_passages, partition):
            asked.add(partition)
            return await search(query, num_passages=num_passages, partition=partition)

        object.__setattr__(agent.roles, "search", noting)
        row = {"question": questions[0].text, "answer": questions[0].golden_answers}
        mempipe.evaluate(agent, [row])
        assert asked == {agent.partition} and bool(agent.partition) == (not loaded)
        asked.clear()
        mempipe.evaluate(agent, questions[:1])
        assert asked == {questions[0].partition}


def test_a_question_that_does_not_fit_counts_as_failed(agent, questions):
    long = replace(questions[0], id="long", text="word " * 100)
    table = mempipe.evaluate(agent, [questions[1], long]).table
    assert table["em"].to_list() == [1.0, 0.0]
    assert "budget.question_tokens" in table["failed"][1]


def test_a_control_takes_the_memory_away(agent, questions):
    many_hops = [question for question in questions if question.num_hops > 1]
    assert mempipe.evaluate(agent, many_hops).interval().value == 1.0
    assert mempipe.evaluate(agent, many_hops, control="no_memory").interval().value == 0.0
    assert mempipe.evaluate(agent, many_hops, control="no_search").interval().value == 0.0


def test_an_evaluation_samples_at_its_temperature(agent, engines, questions):
    mempipe.evaluate(agent, questions[:1], num_samples=3, temperature=0.7)
    assert {sampling.temperature for sampling in engines.started[0].samplings} == {0.7}
    assert len(mempipe.evaluate(agent, questions[:1], num_samples=3, temperature=0.7).groups[0].trajectories) == 3


def test_a_folder_is_evaluated_and_its_agent_ended(run, engines, questions):
    assert mempipe.evaluate(mempipe.Run(run), questions[:2]).interval().value == 1.0
    assert engines.num_ended == len(engines.started) == 1


def test_a_sweep_finds_the_memory_that_is_enough(agent, questions):
    swept = mempipe.sweep(agent, questions, memory_tokens=[64, 4, 24])
    assert swept.table["memory_tokens"].to_list() == [4, 24, 64]
    scores = swept.table["em"].to_list()
    assert scores[-1] == 1.0 and scores[0] < 1.0
    assert swept.evaluations[4].interval().value == pytest.approx(scores[0])
    assert swept.evaluations[4].config.budget.memory_tokens == 4
    messages = {each.config.budget.memory_message_limit for each in swept.evaluations.values()}
    assert messages == {agent.config.budget.memory_message_limit}, "as by the command: the memory is cut, no message"
    assert swept.table["verdict"].to_list()[-1] is None and "cannot be told with" in swept.verdict  # a few questions
    assert "24 tokens are enough" in mempipe.sweep(agent, questions, memory_tokens=[24, 64], margin=99.0).verdict
    assert agent.config.budget.memory_tokens == 64


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([64], "expected two different budgets or more"),
        ([64, 64], "expected two different budgets or more"),
        ([64, 4096], "budget.context_tokens is 512"),
        ([0, 64], "memory_tokens"),
        (["16", "64"], "memory_tokens is ['16', '64']; expected a list of whole numbers"),
        (64, "memory_tokens is 64; expected a list of whole numbers"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(agent, questions, budgets, message):
    with pytest.raises(mempipe.ConfigError) as error:
        mempipe.sweep(agent, questions, memory_tokens=budgets)
    assert message in str(error.value)


def test_a_run_is_read_as_frames(run):
    opened = mempipe.Run(run)
    assert opened.finished and opened.report == run / "report.html" and opened.model == run / "huggingface"
    assert opened.metrics.to_dicts() == STEPS and opened.checkpoints == []
    assert opened.evaluations["label"].to_list() == ["before", "after"]
    assert opened.evaluations["em"].to_list() == [0.0, 1.0] and opened.evaluations["step"].to_list() == [0, 3]
    attempts = opened.trajectories()
    assert attempts.group_by("phase").len().sort("phase")["len"].to_list() == [12, 12]
    assert attempts.filter(pl.col("phase") == "before")["answer"].str.strip_chars().unique().to_list() == ["nobody"]
    assert "3 of 3 steps, finished" in repr(opened)
    with pytest.raises(mempipe.ConfigError, match="holds no run"):
        mempipe.Run(run.parent)


def test_the_turns_of_a_run_are_a_frame_with_their_facts(tmp_path):
    """Question 2 loses its first fact in the second turn after the training; question 1 is right then."""
    folder = write_run(tmp_path)
    (folder / "state.json").write_text(json.dumps({"finished": True, "seconds": {}, "num_steps": 3}))
    turns = mempipe.Run(folder).trajectories(turns=True)
    assert turns.height == 2 * 3 * 3 and turns["message_tokens"].unique().to_list() == [4]
    after = turns.filter(pl.col("phase") == "after")
    lost = after.filter(pl.col("question_id") == "q2").sort("turn")
    assert lost["memory"].to_list() == ["Oslo fjord", "Ann", None] and lost["memory_tokens"].to_list() == [2, 1, None]
    facts = lost.select("facts_held", "facts_gained", "facts_lost").rows()
    assert facts == [(1, 1, 0), (1, 1, 1), (1, 0, 0)]
    assert lost["hops"].to_list() == [1] * 3 and set(lost["first_cause"]) == {"lost"}
    right = after.filter(pl.col("question_id") == "q1").sort("turn")
    assert right["first_cause"].to_list() == [None] * 3 and right["hops"].to_list() == [2] * 3
    assert right["memory"].to_list() == ["Oslo fjord", "Oslo Ann", None], "the answering turn wrote none"


def test_every_message_of_a_full_history_is_a_turn(tmp_path):
    opened = mempipe.Run(write_full_history_run(tmp_path))
    assert opened.trajectories()["turns"].to_list() == [3] and opened.evaluations["turns"].to_list() == [3.0]
    assert opened.trajectories(turns=True).height == 1, "all its turns are in one context"


def test_facts_are_null_where_they_are_not_known(run):
    turns = mempipe.Run(run).trajectories(turns=True)
    assert turns.height == mempipe.Run(run).trajectories()["turns"].sum()
    assert set(turns["first_cause"].drop_nulls()) <= set(Cause)
    assert turns["facts_held"].null_count() in (0, turns.height)


def test_the_command_prints_the_answer_alone(run, engines, questions, capsys):
    question = questions[0]
    assert cli.main(["ask", str(run), question.text, "--partition", question.partition]) == 0
    assert capsys.readouterr().out == f"{question.golden_answers[0]}\n"
    assert engines.num_ended == 1


def test_the_command_prints_each_turn_on_request(run, engines, questions, capsys):
    question = next(each for each in questions if each.num_hops == 2)
    assert cli.main(["ask", str(run), question.text, "--partition", question.partition, "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("turn")] == ["turn 1", "turn 2", "turn 3"]
    assert lines[-1] == question.golden_answers[0]


def test_the_command_refuses_in_a_sentence(run, engines, capsys):
    assert cli.main(["ask", "nowhere/at/all", "What?"]) == 2
    assert cli.main(["ask", str(run), " "]) == 2
    assert cli.main(["ask", str(run), "What?", "budget.max_turn=2"]) == 2
    assert cli.main(["ask", str(run), "What?", "index=my-index"]) == 2
    assert cli.main(["ask", str(run), "What?", "source=x"]) == 2
    assert not engines.started
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 5 and "does not exist" in errors[0] and "QUESTION is empty" in errors[1]
    assert "did you mean budget.max_turns?" in errors[2]
    assert errors[3].endswith("index is an option of this command, not a setting: --index")
    assert errors[4].endswith("source is not a setting of a run")


def test_the_command_says_when_there_is_no_answer(run, engines, questions, capsys):
    assert cli.main(["ask", str(run), questions[-1].text, "budget.max_turns=1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no answer: it used up its turns (budget.max_turns)" in err


def test_rows_of_a_run_are_json(run):
    assert json.loads(mempipe.Run(run).metrics.write_json())[0]["step"] == 1
