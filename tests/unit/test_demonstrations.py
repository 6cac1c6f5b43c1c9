"""What a warm start imitates: a script that knows what a question was made of, recorded trajectories that scored, never
what is held out; and a start that resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from agent_builders import hf_tokenizer
from anyio.from_thread import start_blocking_portal
from faulty_server import faulty, says
from learner_setup import make_learner, pack, sample, samples, save_model
from test_remote_retrieval import serving

from mempipe.agents.protocol import tool_call_texts
from mempipe.config import RunConfig
from mempipe.data.objectives import join_objectives
from mempipe.data.qa import write_questions
from mempipe.data.scripted_agents import Noise
from mempipe.data.trajectories import read_trajectories, write_trajectories
from mempipe.engines.checkpoint import Position
from mempipe.engines.proof import CANARY_END, CANARY_TOKENS
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.evaluation.results import ResultFolder, result_row
from mempipe.faults import ServiceFault
from mempipe.loader import parse_config
from mempipe.masking.demonstrations import (
    KNOWS_NOTHING,
    ClozeMem1,
    ClozeMemSearcher,
    ClozeReact,
    ReadingDemonstration,
    ReadingMemAgent,
)
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import ServiceConfig
from mempipe.retrieval.encoders import HashingEncoder
from mempipe.retrieval.retriever import Retriever
from mempipe.rl.packing import pack_step
from mempipe.rl.samples import to_samples
from mempipe.rollout import first_prompt, prompt_hash
from mempipe.runs import Run
from mempipe.serve.retrieval_app import RetrievalService, make_app
from mempipe.settings import ConfigError
from mempipe.stop import Interrupted, StopRequest
from mempipe.types import Completion, Evidence, FinishReason, Group, Passage, Question
from pipelines import demonstrations as demonstrations_module
from pipelines import warm_start
from pipelines.demonstrations import TaughtAttempts, demonstrations
from pipelines.train import _canary

RIVERS = ("Amber", "Birch", "Cedar", "Dover", "Elm", "Fenn", "Grove", "Heath")
PASSAGES = [
    Passage(
        id=f"p{i}", title=f"{name} River", text=f"The {name} River flows past the old town of {name[::-1].title()}."
    )
    for i, name in enumerate(RIVERS)
]
QUESTIONS = [
    Question(
        id=f"q{i}",
        text=f"{name} River: The {name} River flows past the old town of ____.",
        golden_answers=[name[::-1].title()],
        num_hops=1,
        evidence=[Evidence(passage_id=f"p{i}", value=name[::-1].title())],
    )
    for i, name in enumerate(RIVERS)
]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run over eight passages, with a byte-level tokenizer."""
    hf_tokenizer("qwen2_5").save_pretrained(tmp_path / "model")
    build_index(PASSAGES, tmp_path / "index", lexical=True)
    write_questions(tmp_path / "train.parquet", QUESTIONS)
    limits = {"question_tokens": 400, "memory_tokens": 300, "action_tokens": 300, "observation_tokens": 600}
    return parse_config(
        {
            "output": str(tmp_path / "runs"),
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "agent": {"prompts": "compact"},
            "budget": {**limits, "max_turns": 3, "context_tokens": 4096},
            "retrieval": {"index": str(tmp_path / "index"), "mode": "lexical", "num_passages": 1, "max_passages": 1},
            "data": {"train": str(tmp_path / "train.parquet")},
            "warm_start": {"num_clean_trajectories": 4, "num_noisy_trajectories": 2, "num_held_out": 2},
        }
    )


def with_warm_start(config: RunConfig, **changes: object) -> RunConfig:
    values = config.model_dump(mode="json")
    return parse_config({**values, "warm_start": {**values["warm_start"], **changes}})


def test_the_script_finds_notes_and_answers(config):
    shown = demonstrations(config)
    assert (len(shown.clean), len(shown.noisy), len(shown.held_out)) == (4, 2, 2)
    for group in [*shown.clean, *shown.held_out]:
        (trajectory,) = group.trajectories
        assert trajectory.em == 1 and len(trajectory.contexts) == 2
        assert group.question.golden_answers[0] in trajectory.contexts[1].memory_before


def with_agent(config: RunConfig, **agent: object) -> RunConfig:
    limits = {"question_tokens": 300, "context_tokens": 16384}
    values = config.model_dump(mode="json")
    return parse_config({**values, "agent": agent, "budget": {**values["budget"], **limits}})


@pytest.mark.parametrize(
    "agent", [{}, {"prompts": "tiny"}, {"prompts": "compact", "tool_name": "search"}], ids=["own", "tiny", "tool_name"]
)
def test_the_script_writes_for_the_prompts_and_the_search_function_of_the_agent(config, agent):
    shown = demonstrations(with_agent(config, **agent))
    assert (len(shown.clean), len(shown.noisy), len(shown.held_out)) == (4, 2, 2)
    assert all(len(group.trajectories[0].contexts) == 2 for group in shown.clean)


def test_a_script_that_earns_nothing_is_not_imitated(config, tmp_path):
    (tmp_path / "own.yaml").write_text("base: compact\nuser: |-\n  {question}\n  Notes: {memory}\n")
    with pytest.raises(
        ConfigError, match=r"'memsearcher' earned nothing with any question .* agent\.prompts '.*own\.yaml'"
    ):
        demonstrations(with_agent(config, prompts=str(tmp_path / "own.yaml")))


def test_no_question_is_used_twice(config):
    shown = demonstrations(config)
    asked = [group.question.id for part in (shown.clean, shown.noisy, shown.held_out) for group in part]
    assert len(asked) == len(set(asked)) == 8


def test_the_same_seed_gives_the_same_trajectories(config):
    def ids() -> list[list[int]]:
        shown = demonstrations(config)
        groups = [*shown.clean, *shown.noisy, *shown.held_out]
        return [context.token_ids for group in groups for context in group.trajectories[0].contexts]

    assert ids() == ids()


async def test_a_script_plays_although_an_event_loop_runs_as_in_a_notebook(config):
    assert len(demonstrations(config).clean) == 4
    tokenizer = load_tokenizer(config.model.path)
    assert prompt_hash(config, tokenizer=tokenizer)
    question = Question(id="q", text="Who made the lamp?", golden_answers=["Ann"], context="Ann made the lamp.")
    prompt = first_prompt(config, question, tokenizer=tokenizer)
    assert question.text in tokenizer.decode(prompt) and len(prompt) > len(tokenizer.encode_text(question.text))


def test_the_canaries_of_a_run_begin_with_prompts_of_its_agent(config):
    """And not with the questions alone, which are shorter than a block of an engine's cache."""
    question = Question(id="q", text="Who made the lamp?", golden_answers=["Ann"], context="Ann made the lamp.")
    (canary,) = _canary(config, [question])
    prompt = first_prompt(config, question, tokenizer=load_tokenizer(config.model.path))
    assert canary[: len(prompt)] == prompt[: len(canary)]
    assert len(canary) == min(CANARY_TOKENS, config.budget.context_tokens - 1) > CANARY_END


def test_demonstrations_search_as_the_run_does(config, tmp_path):
    build_index(PASSAGES, tmp_path / "both", lexical=True, encoder=HashingEncoder())

    def snapshots(**retrieval: str) -> set[str]:
        changed = config.model_copy(update={"retrieval": config.retrieval.model_copy(update=retrieval)})
        contexts = [context for group in demonstrations(changed).clean for context in group.trajectories[0].contexts]
        return {search.snapshot for context in contexts for search in context.searches}

    index = str(tmp_path / "both")
    for mode in ("lexical", "dense", "fusion"):
        assert snapshots(index=index, mode=mode) == {Retriever(index, mode=mode).snapshot}
    lexical = RetrievalService(Retriever(index, mode="lexical"), ServiceConfig(index="unused"))
    with serving(make_app(lexical)) as url:
        assert snapshots(index="", url=url) == {Retriever(index, mode="lexical").snapshot}


def test_a_teacher_plays_batch_after_batch_over_the_same_connections(config, monkeypatch):
    monkeypatch.setattr(demonstrations_module, "TRAJECTORIES_AT_ONCE", 3)
    reply = says({"choices": [{"text": "I do not know.", "finish_reason": "stop"}]})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(faulty([reply])) as (url, asked):
        teacher = {"url": url, "model": "m", "max_concurrency": 1, "timeout_s": 30}
        taught = demonstrations(
            with_warm_start(config, teacher=teacher, min_score=0.0, num_clean_trajectories=6, num_noisy_trajectories=0)
        )
    assert len(taught.clean) == 6 and len(taught.held_out) == 2
    assert len(asked) >= 8


def test_a_teachers_finished_attempts_are_kept_and_not_played_again(config, tmp_path, monkeypatch):
    monkeypatch.setattr(demonstrations_module, "TRAJECTORIES_AT_ONCE", 3)
    long = dataclasses.replace(QUESTIONS[1], text="long " * 400)
    write_questions(tmp_path / "train.parquet", [QUESTIONS[0], long, *QUESTIONS[2:]])
    ok, refused = says({"choices": [{"text": "I do not know.", "finish_reason": "stop"}]}), says({}, status=400)
    wanted = {"min_score": 0.0, "num_clean_trajectories": 5, "num_noisy_trajectories": 0}

    def start(run: Run | None, answers: list[Any]) -> Run:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(faulty(answers)) as (url, _):
            teacher = {"url": url, "model": "m", "max_concurrency": 1, "timeout_s": 5}
            taught = with_warm_start(config, teacher=teacher, **wanted)
            run = run or Run(taught)
            try:
                warm_start.recorded_demonstrations(run, taught)
            except ServiceFault:
                assert answers[-1] is refused
            return run

    run = start(None, [ok] * 4 + [refused])
    parts = run.folder / "demonstrations" / "taught"
    before = TaughtAttempts(parts).finished
    assert {0, 1, 2} <= before.keys() and len(before) < 8
    start(run, [ok, ok, refused, ok])
    assert not parts.exists()
    shown = [read_trajectories(parts.parent / f"{part}.parquet") for part in ("held_out", "clean")]
    groups = {group.question.id: group for part in shown for group in part}
    assert list(groups) == ["q0", *(f"q{i}" for i in range(2, 8))]
    for number, group in before.items():
        assert (group is None) == (number == 1)
        if group is not None:
            again, (played,) = groups[f"q{number}"].trajectories[0], group.trajectories
            assert [c.generate_seconds for c in again.contexts] == [c.generate_seconds for c in played.contexts]


def test_a_teachers_finished_attempts_are_kept_when_a_signal_ends_the_wait(config, tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def end(number: int, frame: object) -> None:
        raise Ended

    asked = 0

    async def generate(token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        nonlocal asked
        asked += 1
        if asked == 4:
            await asyncio.sleep(1.0)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if asked > 3:
            await asyncio.sleep(60)
        return Completion(token_ids=[1], logprobs=[-1.0], finish_reason=FinishReason.STOP, policy_version=0)

    monkeypatch.setattr(demonstrations_module, "_teacher", lambda config: generate)
    wanted = with_warm_start(config, teacher={"url": "http://127.0.0.1:1", "model": "m"}, min_score=0.0)
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(Ended):
            demonstrations(wanted, taught=TaughtAttempts(tmp_path / "taught"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(TaughtAttempts(tmp_path / "taught").finished) == 3


def test_a_query_with_a_backslash_is_a_call_that_can_be_read():
    text = 'Notes: A file of "C:\\Temp\\new" stood on the disk of ____.'
    asked = Question(
        id="q", text=text, golden_answers=["Rome"], num_hops=1, evidence=[Evidence(passage_id="p", value="Rome")]
    )
    (call,) = tool_call_texts(ClozeMemSearcher(question=asked).reply("<memory></memory>"))
    assert "C:\\Temp\\new" in json.loads(call)["arguments"]["query"]


def test_recorded_trajectories_are_imitated_when_they_scored(config, tmp_path):
    recorded = demonstrations(config).clean
    wrong = [
        dataclasses.replace(group, trajectories=[dataclasses.replace(t, em=0.0, f1=0.5) for t in group.trajectories])
        for group in recorded[:3]
    ]
    write_trajectories(tmp_path / "recorded.parquet", [*wrong, *recorded[3:]])
    file = {"trajectories": [str(tmp_path / "recorded.parquet")], "num_held_out": 0}
    assert len(demonstrations(with_warm_start(config, **file)).clean) == 1
    assert len(demonstrations(with_warm_start(config, **file, metric="f1", min_score=0.5)).clean) == 4
    with pytest.raises(ConfigError, match=r"no trajectory is left to imitate.*f1 is at least 2$"):
        demonstrations(with_warm_start(config, **file, metric="f1", min_score=2.0))
    with pytest.raises(ConfigError, match=r"em is at least 1, and all 1 of them are held out \(num_held_out 64\)$"):
        demonstrations(with_warm_start(config, **file | {"num_held_out": 64}))


def test_of_recorded_recalls_one_right_one_is_imitated(reading, tmp_path):
    recorded = [group for group in demonstrations(reading).clean if group.trajectories[0].recalls]
    for group in recorded:
        (right,) = group.trajectories[0].recalls
        wrong = dataclasses.replace(right, score=0.0, answer="unknown")
        group.trajectories[:] = [dataclasses.replace(group.trajectories[0], recalls=[wrong, right, right])]
    write_trajectories(tmp_path / "recorded.parquet", recorded)
    file = {"trajectories": [str(tmp_path / "recorded.parquet")], "num_held_out": 0}
    clean = demonstrations(with_warm_start(reading, **file)).clean
    assert [[recall.score for recall in group.trajectories[0].recalls] for group in clean] == [[1.0]] * len(recorded)
    assert recorded


def test_recorded_trajectories_of_another_tokenizer_or_agent_are_refused(config, tmp_path):
    folder = tmp_path / "played"
    write_trajectories(folder / "trajectories.parquet", demonstrations(config).clean)
    config = with_warm_start(config, trajectories=[str(folder)], num_held_out=0)
    assert len(demonstrations(config).clean) == 4
    other = shutil.copytree(config.model.path, tmp_path / "other") / "tokenizer.json"
    values = json.loads(other.read_text())
    letters = {token: id for token, id in values["model"]["vocab"].items() if len(token) == 1}
    values["model"]["vocab"] |= dict(zip(letters, [*letters.values()][1:] + [*letters.values()][:1], strict=True))
    other.write_text(json.dumps(values))
    model = config.model.model_copy(update={"path": str(other.parent)})
    with pytest.raises(ConfigError, match=r"played/trajectories.parquet, whose token ids are of another tokenizer"):
        demonstrations(config.model_copy(update={"model": model}))
    for name, is_refused in (("memsearcher", False), ("react", True), ("own.module:AGENT", True)):
        settings = config.model_dump(mode="json") | {"agent": {"name": name}}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        with (
            pytest.raises(ConfigError, match=rf"where agent\.name is '{name}'; agent\.name is 'memsearcher' here")
            if is_refused
            else nullcontext()
        ):
            demonstrations(config)


def evaluated(folder: Path, groups: Sequence[Group]) -> Path:
    """One run on one set of an evaluation, as `mempipe evaluate` writes it: groups are named after their questions."""
    named = [
        dataclasses.replace(
            group,
            id=group.question.id,
            trajectories=[
                dataclasses.replace(t, id=f"{group.question.id}/{t.member}", group_id=group.question.id)
                for t in group.trajectories
            ],
        )
        for group in groups
    ]
    results = ResultFolder(folder, {"run": {}})
    results.open()
    for part in (named[:2], named[2:]):
        results.append(part, [result_row(group, growing=False, prompt_hash="h") for group in part])
    return folder


def test_evaluations_of_several_runs_and_training_runs_are_imitated_together(config, tmp_path):
    recorded = demonstrations(config).clean
    failed = dataclasses.replace(recorded[0], trajectories=[], failed="too long")
    for run in ("first", "second"):
        evaluated(tmp_path / "evaluation" / run / "nq", [*recorded[1:], failed])
        write_trajectories(tmp_path / run / "trajectories.parquet", recorded)
    set_folder, whole = tmp_path / "evaluation" / "first" / "nq", tmp_path / "evaluation"
    for sources, count in (
        ([set_folder], 3),
        ([set_folder / "part-00000.parquet"], 2),
        ([whole / "first"], 3),
        ([whole], 6),
        ([tmp_path / "first"], 4),
        ([whole, tmp_path / "first", tmp_path / "second" / "trajectories.parquet"], 14),
    ):
        wanted = {"trajectories": list(map(str, sources)), "num_held_out": 0, "num_clean_trajectories": 100}
        clean = demonstrations(with_warm_start(config, **wanted)).clean
        assert len(clean) == count
        write_trajectories(tmp_path / "clean.parquet", clean)
        samples = [sample for group in clean for t in group.trajectories for sample in to_samples(t)]
        assert pack_step(samples, num_ranks=1, max_tokens=100_000, aggregation="token")
        assert read_trajectories(tmp_path / "clean.parquet") == clean


def test_what_holds_no_recorded_trajectories_is_refused_by_name(config, tmp_path):
    write_questions(tmp_path / "q.parquet", QUESTIONS)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    folder = evaluated(tmp_path / "evaluation" / "first" / "nq", demonstrations(config).clean)
    for sources, words in (
        ([tmp_path / "q.parquet"], r"q\.parquet holds no trajectories"),
        ([tmp_path / "cut.parquet"], r"cut\.parquet"),
        ([tmp_path / "empty"], r"empty holds no trajectories"),
        ([tmp_path / "nowhere"], r"nowhere does not exist; give the folder of a run or an evaluation"),
        ([folder, tmp_path / "evaluation"], r"warm_start\.trajectories names .*nq twice"),
    ):
        wanted = {"trajectories": list(map(str, sources)), "num_held_out": 0, "num_clean_trajectories": 100}
        with pytest.raises(ConfigError, match=words):
            demonstrations(with_warm_start(config, **wanted))


def test_a_forgetful_script_leaves_its_memory_as_it_was():
    question = QUESTIONS[0]
    prompt = f"<memory>{KNOWS_NOTHING}</memory> <tool_response>{PASSAGES[0].title}: {PASSAGES[0].text}</tool_response>"
    forgetful = ClozeMemSearcher(question=question, noise=Noise(forget=1.0))
    careful = ClozeMemSearcher(question=question)
    assert forgetful.reply(f"{prompt}<memory>") == f"{KNOWS_NOTHING}</memory>"
    assert forgetful.reply(prompt) == f"<memory>{KNOWS_NOTHING}</memory>"
    assert "Rebma" in careful.reply(prompt)


LINKED = Question(
    id="linked",
    text="The [X] River flows past the old town of Rebma. / [X]: The [X] River ends in ____ near Zor.",
    golden_answers=["Lake Nerol"],
    num_hops=2,
    evidence=[Evidence(passage_id="p0", value="Amber"), Evidence(passage_id="lake", value="Lake Nerol")],
)


@pytest.mark.parametrize("agent", ["memsearcher", "mem1", "react"])
def test_a_script_fills_the_gaps_of_several_objectives_one_after_the_other(config, tmp_path, agent):
    lake = Passage(id="lake", title="Lake", text="The Amber River ends in Lake Nerol near Zor.")
    build_index([*PASSAGES, lake], tmp_path / "more", lexical=True)
    asked = list(join_objectives([LINKED, *QUESTIONS[1:6]], objectives=3))
    write_questions(tmp_path / "joined.parquet", asked)
    values = config.model_dump(mode="json", exclude={"agent", "budget"})
    config = parse_config(
        {
            **values,
            "agent": {"name": agent} if agent != "memsearcher" else {"prompts": "compact"},
            "budget": {"question_tokens": 900, "action_tokens": 900, "observation_tokens": 600, "max_turns": 6}
            | {"context_tokens": 16384}
            | ({"memory_tokens": 400, "memory_message_tokens": 500} if agent == "memsearcher" else {}),
            "retrieval": {**values["retrieval"], "index": str(tmp_path / "more")},
            "data": {"train": str(tmp_path / "joined.parquet")},
            "warm_start": {**values["warm_start"], "num_clean_trajectories": 2, "num_held_out": 0}
            | {"num_noisy_trajectories": 0},
        }
    )
    shown = demonstrations(config).clean
    assert len(shown) == len(asked) == 2
    for group in shown:
        (trajectory,) = group.trajectories
        assert trajectory.em == 1 and trajectory.answer == group.question.golden_answers[0]
        searched = [search.query for context in trajectory.contexts for search in context.searches]
        assert len(searched) == len(group.question.evidence)  # one search for each fact, in the order of the question
        if "linked" in group.question.id:  # the second search names what the first one found
            at = group.question.id.split("+").index("linked") + 1
            assert "Amber" not in searched[at - 1] and "Amber" in searched[at]
        if agent == "memsearcher":
            notes = trajectory.contexts[-1].memory_before.split("; ")
            assert [note.partition("[")[2].partition("]")[0] for note in notes] == [
                fact.value for fact in group.question.evidence
            ]
            assert all(len(note.split()) <= 9 for note in notes)  # the value and four words on each side


def test_a_script_gives_up_what_a_search_did_not_find_and_goes_to_the_next_objective():
    (asked,) = join_objectives([LINKED, QUESTIONS[1]], objectives=2)
    script = ClozeMemSearcher(question=asked)
    memory = "<memory>nothing yet</memory>"
    message = script.reply(memory)
    assert message.startswith("I need The [X] River flows past the</think>")  # which of the gaps
    (call,) = tool_call_texts(message)
    assert "Rebma" in json.loads(call)["arguments"]["query"]
    note = script.reply(f"{memory}<tool_response>Nothing of use.</tool_response><memory>")
    assert note == "The [unknown] River flows past the</memory>"
    (call,) = tool_call_texts(script.reply(f"<memory>{note}"))
    assert "Birch" in json.loads(call)["arguments"]["query"]
    passage = f"<tool_response>{PASSAGES[1].text}</tool_response>"
    note = script.reply(f"<memory>{note}{passage}<memory>")
    assert note == "The [unknown] River flows past the; the old town of [Hcrib] .</memory>"
    answer = script.reply(f"<memory>{note}")
    assert answer.endswith(r"\boxed{River; Hcrib}")  # of the first one a name of its text


def test_a_thought_about_one_of_several_gaps_is_one_note_whatever_its_words_are():
    """MEM1's notes are separated by semicolons, and all but the last part of a thought are notes."""
    pause = dataclasses.replace(QUESTIONS[1], id="pause", text="Cirrus: It rose; near ____ it fell; all saw it.")
    (asked,) = join_objectives([pause, QUESTIONS[2]], objectives=2)
    script = ClozeMem1(question=asked)
    message = script.reply("")
    assert message.startswith("<think>I need Cirrus: It rose near ____ it fell all saw</think>")
    found = f"{message}<information>{pause.golden_answers[0]}</information>"
    assert script.reply(found).startswith(
        f"<think>Cirrus: It rose near [{pause.golden_answers[0]}] it fell all saw; I need "
    )


@pytest.mark.parametrize(
    ("lengths", "most", "rows"),
    [((1000, 900, 800), 16384, [1700, 1000]), ((3000, 100), 16384, [3000, 100]), ((1000, 500), 1200, [1000, 500])],
)
def test_a_demonstration_may_be_longer_than_an_update(config, lengths, most, rows):
    config = with_warm_start(config, tokens_per_step=2048)
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"max_tokens_per_micro_batch": most})}
    )
    shown = [
        sample(np.random.default_rng(i), length=length, index=i, advantage=1.0) for i, length in enumerate(lengths)
    ]
    (packed,) = warm_start._packed(shown, config, num_ranks=1)
    assert sorted(len(row.token_ids) for row in packed) == sorted(rows)
    with pytest.raises(ValueError, match=rf"max_tokens_per_micro_batch {most}; raise it to at least {most + 1}"):
        warm_start._packed([sample(np.random.default_rng(0), length=most + 1)], config, num_ranks=1)


def test_a_recorded_context_that_no_micro_batch_holds_is_refused_before_the_training(config):
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"max_tokens_per_micro_batch": 2000})}
    )
    rng = np.random.default_rng(0)
    warm_start._check_lengths([sample(rng, length=2000)], config)
    with pytest.raises(ConfigError, match=r"trajectory t0 has 2001 tokens .*max_tokens_per_micro_batch 2000; raise it"):
        warm_start._check_lengths([sample(rng, length=5), sample(rng, length=2001)], config)


class InterruptedLearners:
    """Counts updates, keeps the newest position, and fails once before update `fails_at`."""

    def __init__(self, fails_at: int = -1, *, signal_at: int | None = None) -> None:
        self.signal_at = signal_at
        self.fails_at, self.saved, self.trained = fails_at, Position(), 0
        self.ranks = ["the only one"]

    def restore(self, folder: Path) -> Position | None:
        self.trained = self.saved.step
        return self.saved if self.saved.step else None

    def step(self, updates: list, *, stop: StopRequest) -> list[dict[str, float]]:
        if 0 <= self.fails_at < self.trained + len(updates):
            self.fails_at = -1
            raise RuntimeError("a rank died")
        self.trained += len(updates)
        if self.signal_at is not None and self.trained >= self.signal_at:
            self.signal_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        return [{"loss": float(self.trained - len(updates) + i)} for i in range(len(updates))]

    def score(self, sequences: list[list[int]], *, temperature: float) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]

    def save(self, folder: Path, position: Position, *, keep: int) -> None:
        self.saved = position


def test_an_interrupted_start_goes_on_from_its_checkpoint(config):
    config = with_warm_start(config, tokens_per_step=1, checkpoint_every=3)
    run, learners = Run(config), InterruptedLearners(fails_at=5)
    shown = demonstrations(config)
    updates = list(warm_start._updates(warm_start._samples(shown, order="noisy_last", seed=1), tokens_per_step=1))
    held_out = warm_start._samples_of(shown.held_out)
    with pytest.raises(RuntimeError, match="a rank died"):
        warm_start._train(run, learners, config, updates, held_out=held_out, stop=StopRequest(30.0))
    assert learners.saved.step == 3
    warm_start._train(run, learners, config, updates, held_out=held_out, stop=StopRequest(30.0))
    record = json.loads((run.folder / "warm_start.json").read_text())
    assert record["losses"] == [float(i) for i in range(len(updates))]
    steps = [each["updates"] for each in record["held_out"]]
    assert steps == sorted({*range(3, len(updates), 3), len(updates)}) and record["held_out"][0]["loss"] == 1.0


def test_held_out_losses_after_the_checkpoint_are_measured_again_once(config, monkeypatch):
    config = with_warm_start(config, tokens_per_step=1, checkpoint_every=3)
    run, learners = Run(config), InterruptedLearners()
    shown = demonstrations(config)
    updates = list(warm_start._updates(warm_start._samples(shown, order="noisy_last", seed=1), tokens_per_step=1))
    held_out = warm_start._samples_of(shown.held_out)

    def full(folder: Path, position: Position, *, keep: int) -> None:
        if position.step > 3:
            raise OSError("No space left on device")
        learners.saved = position

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(learners, "save", full)
        warm_start._train(run, learners, config, updates, held_out=held_out, stop=StopRequest(30.0))
    assert learners.saved.step == 3
    warm_start._train(run, learners, config, updates, held_out=held_out, stop=StopRequest(30.0))
    steps = [each["updates"] for each in json.loads((run.folder / "warm_start.json").read_text())["held_out"]]
    assert steps == sorted({*range(3, len(updates), 3), len(updates)})


def test_held_out_losses_are_of_the_temperature_of_the_training(tmp_path):
    learner = make_learner(save_model(tmp_path), objective="sft", temperature=0.5, lr=1e-12)
    shown = [dataclasses.replace(each, advantage=1.0) for each in samples(0)]
    (report,) = learner.step([pack(shown)[0]])
    assert warm_start._loss(learner, shown, temperature=0.5) == pytest.approx(report["loss"], abs=1e-4)


def test_a_start_that_is_told_to_end_saves_every_update_that_it_made(config):
    config = with_warm_start(config, tokens_per_step=1, checkpoint_every=1000)
    run, learners = Run(config), InterruptedLearners(signal_at=2)
    shown = demonstrations(config)
    updates = list(warm_start._updates(warm_start._samples(shown, order="noisy_last", seed=1), tokens_per_step=1))
    with pytest.raises(Interrupted), StopRequest(30.0).listening() as stop:
        warm_start._train(run, learners, config, updates, held_out=[], stop=stop)
    assert learners.saved.step == learners.trained >= 2
    assert len(json.loads((run.folder / "warm_start.json").read_text())["losses"]) == learners.trained


def test_noisy_trajectories_are_seen_last_or_among_the_clean_ones(config):
    shown = demonstrations(config)
    noisy = {tuple(sample.token_ids) for sample in warm_start._samples_of(shown.noisy)}

    def ranks_of_noisy_ones(order: str) -> list[int]:
        samples = warm_start._samples(shown, order=order, seed=1)
        assert len(samples) == len(warm_start._samples_of([*shown.clean, *shown.noisy]))
        return [rank - len(samples) for rank, sample in enumerate(samples) if tuple(sample.token_ids) in noisy]

    last = ranks_of_noisy_ones("noisy_last")
    assert last == list(range(-len(last), 0)) and last
    mixed = ranks_of_noisy_ones("mixed")
    assert len(mixed) == len(last) and mixed != last


def test_a_warm_start_without_a_world_needs_questions_with_evidence(config, tmp_path):
    write_questions(tmp_path / "train.parquet", [dataclasses.replace(q, evidence=[]) for q in QUESTIONS])
    with pytest.raises(ConfigError, match="no trajectory is left to imitate"):
        demonstrations(config)


def test_another_agent_has_no_script_on_text(config):
    values = config.model_dump(mode="json")
    other = {"agent": {"name": "full_text"}, "budget": {}, "reward": {}}
    with pytest.raises(ConfigError, match=r"no script plays agent\.name 'full_text'.*warm_start\.trajectories"):
        demonstrations(parse_config({**values, **other}))


TWO_HOPS = Question(
    id="two",
    text="Amber River: The Amber River flows past [X]. / [X]: The town of [X] has a mill on ____.",
    golden_answers=["Kite Hill"],
    num_hops=2,
    evidence=[Evidence(passage_id="p0", value="Rebma"), Evidence(passage_id="p9", value="Kite Hill")],
)


@pytest.fixture(params=["react", "mem1"])
def tagged(config, tmp_path, request) -> RunConfig:
    """ReAct and MEM1 on questions with gaps, some of them of two hops."""
    passages = [*PASSAGES, Passage(id="p9", title="Rebma", text="The town of Rebma has a mill on Kite Hill.")]
    build_index(passages, tmp_path / "both", lexical=True)
    write_questions(tmp_path / "train.parquet", [TWO_HOPS, *QUESTIONS])
    values = config.model_dump(mode="json", include={"output", "model", "data", "warm_start"})
    limits = {"question_tokens": 400, "action_tokens": 500, "observation_tokens": 600, "context_tokens": 8192}
    retrieval = {"index": str(tmp_path / "both"), "mode": "lexical", "num_passages": 1, "max_passages": 1}
    return parse_config(
        {**values, "agent": {"name": request.param}, "budget": {**limits, "max_turns": 4}, "retrieval": retrieval}
    )


def test_tagged_agents_note_what_they_search_for_and_answer(tagged):
    shown = demonstrations(with_warm_start(tagged, num_clean_trajectories=7, num_noisy_trajectories=0))
    assert (len(shown.clean), len(shown.held_out)) == (7, 2)
    (two_hops,) = [g.trajectories[0] for g in [*shown.clean, *shown.held_out] if g.question.id == "two"]
    assert two_hops.answer == "Kite Hill" and two_hops.em == 1
    last = two_hops.contexts[-1].action
    if tagged.agent.name == "mem1":
        assert len(two_hops.contexts) == 3 and "[Rebma]" in last and "[Kite Hill]" in last
    else:
        thoughts = last.split("</think>")
        assert len(two_hops.contexts) == 1 and [t.count("[Rebma]") for t in thoughts] == [0, 1, 0, 0]


def test_a_forgetful_react_searches_again_until_its_turns_are_spent():
    script = ClozeReact(question=QUESTIONS[0], noise=Noise(forget=1.0, answer_early=0.0, vague_query=0.0), max_turns=2)
    prompt = "Think inside <think> tags."
    first = script.reply(prompt)
    found = f"{first}<information>{PASSAGES[0].text}</information>"
    assert first.endswith("<search>Amber River</search>")
    assert script.reply(prompt + found).endswith("<answer>Amber River</answer>")


DOCUMENT = Question(
    id="d0",
    text="What does [MASK] stand for?",
    golden_answers=["Dover"],
    context=(
        "Amber River\nThe Amber River flows past the old town of Rebma.\n\n"
        "Dover\nThe city of [MASK] has a harbour at the sea.\n\n"
        "Cedar River\nThe long Cedar River was first crossed by Ann Lee in a boat."
    ),
    recall_targets=[["Rebma"], ["Ann Lee", "Lee"]],
)


@pytest.fixture
def reading(config, tmp_path) -> RunConfig:
    """MemTrain on eight documents of three chunks and more; there is no index."""
    write_questions(tmp_path / "train.parquet", [dataclasses.replace(DOCUMENT, id=f"d{i}") for i in range(8)])
    limits = {"question_tokens": 60, "memory_tokens": 300, "action_tokens": 60, "memory_message_tokens": 310}
    return parse_config(
        {
            **config.model_dump(mode="json", include={"output", "model", "data", "warm_start"}),
            "agent": {"name": "memtrain", "num_recalls": 2},
            "budget": {**limits, "chunk_tokens": 64, "context_tokens": 4096},
        }
    )


def test_the_script_notes_what_a_recall_may_ask_for_and_the_mask(reading):
    (trajectory,) = demonstrations(reading).clean[0].trajectories
    assert trajectory.em == 1 and trajectory.answer == "Dover"
    assert trajectory.contexts[-1].memory_before.splitlines() == [
        "Amber River = Rebma",
        "... = city of [MASK] has a harbour at",
        "... = Ann Lee",
    ]


def test_a_script_closes_the_thought_that_the_chat_template_opens(reading):
    tokenizer = hf_tokenizer("qwen2_5")
    prefill = "'<|im_start|>assistant\\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(prefill + "'", prefill + "<think>\\n'")
    tokenizer.save_pretrained(reading.model.path)
    assert "<think>" in tokenizer.chat_template
    (trajectory,) = demonstrations(reading).clean[0].trajectories
    assert trajectory.em == 1 and trajectory.contexts[-1].action == "</think>\\boxed{Dover}"
    assert trajectory.contexts[0].memory_after == "Amber River = Rebma"


def test_only_the_first_mention_in_a_passage_is_noted():
    script = ReadingDemonstration(question=DOCUMENT, agent={"mask": "[MASK]"})
    section = "<section>Amber River\nREBMA lies on it. It leaves Rebma by night.</section>"
    assert script.reply(f"{section}<memory>{KNOWS_NOTHING}</memory>") == "Amber River = REBMA"


def test_a_recall_is_answered_from_the_memory_under_the_title_of_the_passage(reading):
    shown = demonstrations(reading)
    recalls = [recall for group in shown.clean for recall in group.trajectories[0].recalls]
    assert {recall.answer for recall in recalls} == {"Rebma"}, "Ann Lee stands in the last chunk"

    script = ReadingDemonstration(question=DOCUMENT, agent={"mask": "[MASK]"})
    section = "<section>the end.\n\nAmber River\nIt flows past the old town of [TARGET].</section>"
    assert (
        script.reply(f"{section}<memory>Amber River = by [MASK] now\nAmber River = Rebma</memory>") == r"\boxed{Rebma}"
    )
    assert script.reply(f"{section}<memory>Birch River = Rebma</memory>") == r"\boxed{unknown}"
    in_a_title = "<section>[TARGET]\nA town.</section><memory>Birch River = Rebma</memory>"
    assert script.reply(in_a_title) == r"\boxed{unknown}"


def test_a_forgetful_reader_notes_nothing_new_and_a_full_memory_drops_its_oldest_line():
    section = "<section>Amber River\nIt flows past the old town of Rebma.</section>"
    forgetful = ReadingDemonstration(question=DOCUMENT, agent={"mask": "[MASK]"}, noise=Noise(forget=1.0))
    assert forgetful.reply(f"{section}<memory>(nothing yet)</memory>") == KNOWS_NOTHING
    careful = ReadingDemonstration(question=DOCUMENT, agent={"mask": "[MASK]"})
    full = [f"line {i} = x" for i in range(10)]
    memory = "\n".join(full)
    assert careful.reply(f"{section}<memory>{memory}</memory>").splitlines() == [*full[1:], "Amber River = Rebma"]


def test_questions_without_a_text_are_no_documents(reading, tmp_path):
    write_questions(tmp_path / "train.parquet", QUESTIONS)
    with pytest.raises(ConfigError, match="no trajectory is left to imitate"):
        demonstrations(reading)


def test_a_question_of_a_published_set_has_evidence_and_no_gap_so_no_script_plays_it():
    evidence = [Evidence(passage_id="a", value="Oslo"), Evidence(passage_id="b", value="Ann")]
    question = Question(id="q", text="Who is mayor of the capital?", golden_answers=["Ann"], evidence=evidence)
    assert not ClozeMemSearcher.can_play(question)
    assert ClozeMemSearcher.can_play(dataclasses.replace(question, text="The mayor of Oslo is ____."))


STORY = Question(
    id="s0",
    text="In which town does the mill of Ann Lee stand?",
    golden_answers=["Rebma"],
    context=(
        "Ann Lee was born in Oslo. She bought the mill of Kite Hill in 1850.\n\n"
        "Grove River\nIt floods every spring. Nobody lives there.\n\n"
        "Kite Hill\nThe hill is part of Rebma. It has a mill."
    ),
    evidence=[Evidence(passage_id="a", value="Kite Hill"), Evidence(passage_id="b", value="Rebma")],
)


def test_memagent_notes_the_sentences_with_values_and_answers_from_them(reading, tmp_path):
    write_questions(tmp_path / "train.parquet", [dataclasses.replace(STORY, id=f"s{i}") for i in range(8)])
    values = reading.model_dump(mode="json")
    budget = {**values["budget"], "chunk_tokens": 90}
    config = parse_config({**values, "agent": {"name": "memagent"}, "budget": budget, "reward": {}})
    (trajectory,) = demonstrations(config).clean[0].trajectories
    assert trajectory.em == 1 and trajectory.answer == "Rebma" and len(trajectory.contexts) >= 3
    memory = trajectory.contexts[-1].memory_before
    assert "mill of Kite Hill" in memory and "The hill is part of Rebma." in memory and "floods" not in memory


def test_a_forgetful_memagent_cannot_answer_and_a_text_without_the_answer_is_not_played():
    script = ReadingMemAgent(question=STORY, noise=Noise(forget=1.0))
    assert script.reply(f"<section>{STORY.context}</section><memory>(nothing yet)</memory>") == KNOWS_NOTHING
    assert script.reply(f"<memory>{KNOWS_NOTHING}</memory>") == f"\\boxed{{{KNOWS_NOTHING}}}"
    assert ReadingMemAgent.can_play(STORY)
    assert not ReadingMemAgent.can_play(dataclasses.replace(STORY, golden_answers=["yes"]))
    assert not ReadingMemAgent.can_play(dataclasses.replace(STORY, context=""))
