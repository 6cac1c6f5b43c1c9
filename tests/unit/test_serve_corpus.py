"""What a visitor of a served run can ask: the part of the corpus that is searched, and questions with their answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml
from service_builders import Service, build_service, running

from mempipe.answers.api import CorpusReply
from mempipe.answers.corpus import NUM_EXAMPLES
from mempipe.cli import main
from mempipe.data.partitions import main_partition
from mempipe.data.qa import write_questions
from mempipe.data.world import World, make_questions
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import load_config, parse_section
from mempipe.retrieval.build import build_index
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.retriever import BatchingRetriever, Retriever
from mempipe.serve.agent import welcome_lines
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.http.keys import new_key
from mempipe.serve.served_run import resolve, searched_by
from mempipe.settings import ConfigError
from mempipe.types import Passage, Question

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
WORLDS = [World(seed, id=f"held-out-{seed}") for seed in range(3)]
QUESTIONS = make_questions(WORLDS, 36, seed=4)


def make_run(folder: Path, name: str = "quickstart") -> Path:
    """A finished run of the embedded default, whose index holds three worlds with the same names."""
    build_tokenizer(folder / "huggingface")
    build_model(folder / "huggingface", seed=1)
    passages = [replace(passage, partition=world.id) for world in WORLDS for passage in world.passages]
    build_index(passages, folder / "index")
    write_questions(folder / "world" / "validation.parquet", QUESTIONS)
    config = load_config(CONFIGS / f"{name}.yaml", [f"name={folder.name}", f"output={folder.parent}"])
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "state.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quick")


def searched(**settings) -> CorpusReply:
    config = parse_section(settings, AgentServiceConfig)
    return searched_by(resolve(config))


@pytest.fixture(scope="module")
def service(run, tmp_path_factory) -> Iterator[Service]:
    """The run's service with a faultless script for its policy, and its own index."""
    tokenizer = load_tokenizer(str(run / "huggingface"))
    index = BatchingRetriever(Retriever(str(run / "index")), RetrievalConfig())
    made = build_service(
        tokenizer, tmp_path_factory.mktemp("state"), searched=searched(run=str(run)), index=index.search
    )
    made.engine.known = [question.text for question in QUESTIONS]
    with running(made):
        yield made


def test_what_a_visitor_asks_without_a_partition_is_answered_right(service):
    corpus = httpx.get(f"{service.url}/v1/corpus").json()
    assert corpus["partition"] == "held-out-0" and corpus["partitions"] == [world.id for world in WORLDS]
    assert len(corpus["examples"]) == NUM_EXAMPLES
    for example in corpus["examples"]:
        reply = httpx.post(f"{service.url}/v1/answer", json={"question": example["question"]}).json()
        assert [reply["answer"].strip()] == example["golden_answers"], example
        chat = {"model": "tiny", "messages": [{"role": "user", "content": example["question"]}]}
        reply = httpx.post(f"{service.url}/v1/chat/completions", json=chat).json()
        assert [reply["choices"][0]["message"]["content"]] == example["golden_answers"], example


def test_a_visitor_may_search_another_part_or_all_of_it(service):
    (asked, *_) = [question for question in QUESTIONS if question.partition == "held-out-2"]

    def titles(**named: str) -> set[str]:
        body = {"question": asked.text, **named}
        turns = httpx.post(f"{service.url}/v1/answer", json=body).json()["turns"]
        return {p["id"].partition("/")[0] for turn in turns for s in turn["searches"] for p in s["passages"]}

    assert titles() == {"held-out-0"} and titles(partition="held-out-2") == {"held-out-2"}
    assert titles(partition="") != {"held-out-0"}


def test_the_examples_are_held_out_questions_of_that_part_and_hop_counts_take_turns(run):
    corpus = searched(run=str(run))
    golds = {(q.text, q.partition): q.golden_answers for q in QUESTIONS}
    assert [example.golden_answers for example in corpus.examples] == [
        golds[example.question, "held-out-0"] for example in corpus.examples
    ]
    hops = {question.text: question.num_hops for question in QUESTIONS}
    assert [hops[example.question] for example in corpus.examples] == [1, 2, 3, 1, 2, 3]


def test_another_part_can_be_served_and_one_that_is_not_there_is_refused(run, capsys):
    corpus = searched(run=str(run), partition="held-out-1")
    assert corpus.partition == "held-out-1" == corpus.examples[0].partition
    assert searched(run=str(run), partition="").partition == ""
    with pytest.raises(ConfigError, match=r"partition is 'held-out-9', which is none of the 3 of retrieval\.index"):
        searched(run=str(run), partition="held-out-9")
    assert main(["serve", str(run), "partition=held-out-9"]) == 2
    assert "held-out-9" in capsys.readouterr().err


def test_with_another_index_nothing_is_offered(run, tmp_path):
    build_index([Passage(id="1", title="Lima", text="Lima is the capital of Peru.")], tmp_path / "index")
    settings = {"retrieval": {"index": str(tmp_path / "index")}}
    assert searched(run=str(run), settings=settings) == CorpusReply()
    with pytest.raises(ConfigError, match=r"partition is 'held-out-1', which is no part of retrieval\.index"):
        searched(run=str(run), settings=settings, partition="held-out-1")


def test_an_agent_that_reads_is_offered_texts(tmp_path):
    corpus = searched(run=str(make_run(tmp_path / "reader", "quickstart_memagent")))
    assert (corpus.partition, corpus.partitions) == ("", [])
    contexts = {question.text: question.context for question in QUESTIONS}
    assert all(example.text for example in corpus.examples)
    assert [example.text in contexts.values() for example in corpus.examples] == [True] * NUM_EXAMPLES


def test_the_first_words_of_the_service_hold_a_question_and_its_answer(run):
    lines = welcome_lines("http://127.0.0.1:8000", resolve(AgentServiceConfig(run=str(run))))
    words = shlex.split(lines[-1])
    assert lines[-1].count("'") == 4  # the header and the body, each between two
    asked = json.loads(words[words.index("-d") + 1])
    (example, *_) = searched(run=str(run)).examples
    assert asked == {"question": example.question} and "'held-out-0'" in lines[1]
    assert lines[-2] == f"try a held-out question, whose right answer is {example.golden_answers[0]}:"
    assert "authorization" not in lines[-1]


def test_with_keys_the_line_to_try_sends_one(run, tmp_path):
    (tmp_path / "keys").write_text(new_key("ann")[1].line())
    served = resolve(AgentServiceConfig(run=str(run), keys=str(tmp_path / "keys")))
    line = welcome_lines("http://127.0.0.1:8000", served)[-1]
    assert "authorization: Bearer $MEMPIPE_API_KEY" in shlex.split(line)


@pytest.mark.parametrize(("parts", "expected"), [("", ""), ("abc", ""), ("abb", "b"), ("baab", "a")])
def test_the_part_that_most_questions_are_about(parts, expected):
    questions = [Question(id=str(i), text="?", golden_answers=["x"], partition=p) for i, p in enumerate(parts)]
    assert main_partition(questions) == expected
