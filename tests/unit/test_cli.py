"""The commands that start no cluster, as a user types them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from miniature import QUICKSTART

from mempipe.agents.registry import BUILT_IN
from mempipe.cli import _parsed, main
from mempipe.data.trajectories import write_trajectories
from mempipe.engines.checkpoint import Position
from mempipe.evaluation.suite import merged
from mempipe.loader import load_config, load_index_config, load_job, parse_config, parse_section
from mempipe.retrieval.build import build_index
from mempipe.serve.config import AgentServiceConfig
from mempipe.template import KINDS
from mempipe.types import Context, EndReason, Group, Passage, Question, Search, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", [*KINDS, "mempipe.agents.react"])
def test_config_prints_a_complete_file_that_loads_as_it_is(kind, tmp_path, capsys):
    assert main(["config", kind]) == 0
    text = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(text)
    given = yaml.safe_load(text)
    if kind.endswith("service"):
        given = given["applications"][0]["args"]
    if kind == "agent-service":
        loaded = parse_section(given, AgentServiceConfig)
    else:
        _, loaded = load_job(tmp_path / "c.yaml")
    whole = json.loads(loaded.model_dump_json())
    assert merged(whole, given) == whole
    if kind in BUILT_IN or "." in kind:
        assert loaded == parse_config({"agent": {"name": kind}})
    else:
        assert given == whole
    assert (
        kind in (*KINDS[len(BUILT_IN) :], given.get("agent", {}).get("name"))
        and max(map(len, text.splitlines())) <= 120
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_stands_below_its_meaning(kind, capsys):
    main(["config", kind])
    lines = capsys.readouterr().out.splitlines()
    is_service = kind.endswith("service")
    first = next(i for i, line in enumerate(lines) if line.startswith("    args:")) + 1 if is_service else 1
    last = next((i for i in range(first, len(lines)) if lines[i].startswith("  - name: agent")), len(lines))
    settings = [i for i in range(first, last) if re.match(r"\s*(- )?\w+:", lines[i])]
    assert settings and not [lines[i] for i in settings if not lines[i - 1].lstrip().startswith("#")]


def settings_in(values: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        found |= settings_in(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def test_a_config_holds_no_setting_that_its_agent_does_not_use(capsys):
    printed = {}
    for agent in BUILT_IN:
        assert main(["config", agent]) == 0
        printed[agent] = settings_in(yaml.safe_load(capsys.readouterr().out))
    have = {
        setting: {agent for agent in BUILT_IN if setting in printed[agent]}
        for setting in ("retrieval.index", "reward.recall_weight", "reward.attempt_score", "reward.memory_token_cost")
    }
    assert have == {
        "retrieval.index": {"memsearcher", "mem1", "react", "program"},
        "reward.recall_weight": {"memtrain"},
        "reward.attempt_score": {"react"},
        "reward.memory_token_cost": {"memsearcher", "memagent", "memtrain", "mem1"},
    }
    assert "tracking.parent_run_id" not in set().union(*printed.values())


@pytest.mark.parametrize("agent", BUILT_IN)
def test_a_short_config_holds_what_a_run_sets_and_loads(agent, tmp_path, capsys):
    assert main(["config", agent, "--short"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml") == parse_config({"agent": {"name": agent}})
    settings = settings_in(yaml.safe_load(text))
    assert 13 <= len(settings) <= 17 and {"model.path", "data.train", "optimizer.lr"} <= settings


def test_only_a_run_has_a_short_config(capsys):
    assert main(["config", "evaluation", "--short"]) == 2
    assert "--short is for a run of an agent, and 'evaluation' is none" in capsys.readouterr().err


def test_config_of_no_kind_is_refused(capsys):
    assert main(["config", "evaluations"]) == 2
    assert f"choose from {', '.join(KINDS)}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--resume-if-exists"])
def test_resume_may_stand_anywhere_and_says_what_it_means(flag, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("pipelines.train.main", lambda config, resume: started.append((config.seed, resume)))
    quickstart = str(ROOT / "jobs/configs/quickstart.yaml")
    code = main(["train", quickstart, "seed=3", flag, f"output={tmp_path}"])
    if flag == "--resume":  # there is nothing to resume
        assert code == 2 and "--resume: " in capsys.readouterr().err and not started
    else:
        assert code == 0 and started == [(3, "auto")]


@pytest.mark.parametrize(
    ("words", "prints"), [([], "usage: mempipe [-h] [--version] COMMAND"), (["--version"], "mempipe 0.")]
)
def test_a_bare_command_prints_its_help_and_version_its_version(words, prints, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(prints)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "run", "a=1", "--port", "1", "b=2"],
        ["serve", "run", "--host", "h", "a=1", "b=2"],
        ["index", "serve", "i", "--port", "1", "a=1", "b=2"],
        ["data", "cloze", "f", "d", "--show", "1", "a=1", "b=2"],
        ["ask", "run", "why?", "--index", "i", "a=1", "b=2"],
    ],
)
def test_options_may_stand_before_and_between_settings(words):
    assert _parsed(words).overrides == ["a=1", "b=2"]


@pytest.mark.parametrize("words", [["--resum"], ["--resume", "--resume-if-exists"], ["--metric", "f1"]])
def test_options_that_are_none_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "c.yaml", "seed=1", *words])


def test_a_working_folder_that_was_removed_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor", "any.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: the working folder of this command was removed; change to another folder\n"
    )


def test_a_working_folder_whose_name_is_not_utf_8_is_said(tmp_path, monkeypatch, capsys):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"  # as a machine with Latin-1 names it
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    assert main(["doctor", "any.yaml"]) == 2
    assert capsys.readouterr().err == f"error: the name of the working folder is not UTF-8: {folder!r}\n"


def test_data_world_prints_passages_and_answerable_questions(capsys):
    assert main(["data", "world", "--seed", "3", "--questions", "3"]) == 0
    out = capsys.readouterr().out
    assert "(3 hops)" in out and "->" in out


def test_data_qa_says_what_it_understood_and_refuses_with_the_line(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "a", "question": "Who?", "golden_answers": ["me"]}) + "\n")
    assert main(["data", "qa", str(file)]) == 0
    assert "1 questions" in capsys.readouterr().out
    file.write_text(file.read_text() + json.dumps({"id": "b", "question": "", "golden_answers": ["me"]}) + "\n")
    assert main(["data", "qa", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_an_index_is_built_of_texts_without_a_config_and_what_it_cannot_read_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("Lima is the capital of Peru.")
    for words, said in (
        ([str(tmp_path / "notes.txt")], f"name the folder of the index: mempipe index build {tmp_path}"),
        ([str(tmp_path / "none.pdf"), f"output={tmp_path / 'i'}"], f"{tmp_path / 'none.pdf'} does not exist"),
        ([str(tmp_path / "a.doc"), f"output={tmp_path / 'i'}"], f"{tmp_path / 'a.doc'} does not exist"),
        ([str(tmp_path / "notes.txt"), "output=x", "passage_words=2"], "passage_words"),
        ([str(tmp_path / "notes.txt"), "output=x", "passage_word=20"], "did you mean passage_words"),
        ([str(tmp_path / "notes.txt"), "outputs=x"], "outputs is not a setting; did you mean output?"),
        (["notes.txt", "output=x", "corpus=others"], "corpus is 'others', and the command already names 'notes.txt'"),
    ):
        assert main(["index", "build", *words]) == 2
        assert said in (error := capsys.readouterr().err) and "Traceback" not in error
    config = load_index_config(str(tmp_path / "notes.txt"), [f"output={tmp_path / 'i'}"])
    assert (config.corpus, config.encoder, config.lexical) == ([str(tmp_path / "notes.txt")], None, True)
    (tmp_path / "i.yaml").write_text(f"output: {tmp_path / 'i'}\n")
    assert load_index_config(tmp_path / "i.yaml", ["corpus=notes.txt"]).corpus == ["notes.txt"]


@pytest.mark.parametrize("word", ["resume=true", "port=80"])
def test_an_option_that_is_written_as_a_setting_is_named(word, capsys):
    name = word.partition("=")[0]
    command = "train" if name == "resume" else "serve"
    assert main([command, str(QUICKSTART), word]) == 2
    assert f"{name} is an option of this command, not a setting: --{name}\n" in capsys.readouterr().err
    assert main([command, str(QUICKSTART), "resum=true"]) == 2
    assert "resum is not a setting" in capsys.readouterr().err


def test_an_index_is_searched_and_other_peoples_files_become_one(tmp_path, capsys):
    facts = {"Lima": "Peru", "Oslo": "Norway"}
    passages = [
        Passage(id=str(i), title=city, text=f"{city} is the capital of {facts[city]}.") for i, city in enumerate(facts)
    ]
    build_index(passages, tmp_path / "index")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": p.id, "contents": f'"{p.title}"\n{p.text}'}) + "\n" for p in passages))
    theirs = str(tmp_path / "index" / "vectors" / "00000.faiss")
    assert main(["index", "adopt", theirs, str(corpus), str(tmp_path / "adopted"), "kind=hashing"]) == 0
    assert "2 passages" in capsys.readouterr().out
    for index in ("index", "adopted"):
        assert (
            main(["index", "search", str(tmp_path / index), "capital of Norway", "--num-passages", "1", "--json"]) == 0
        )
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["title"], found["id"]) == ("Oslo", "1")
    assert main(["index", "search", str(tmp_path / "index"), "capital of Norway"]) == 0
    assert "Oslo" in capsys.readouterr().out
    build_index(passages, tmp_path / "both", lexical=True)
    assert main(["index", "search", str(tmp_path / "both"), "zebra", "--mode", "lexical"]) == 0
    assert capsys.readouterr().out == "No passage has a word of the query.\n"
    assert main(["index", "search", str(tmp_path), "x"]) == 2
    assert main(["index", "adopt", theirs, str(corpus), str(tmp_path / "again"), "kind=hashing", "dimension=7"]) == 2
    assert main(["index", "build", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("error:") == 3


@pytest.fixture
def run(tmp_path) -> Path:
    search = Search(query="q", num_passages=1, passages=[Passage(id="p", title="T", text="body")], snapshot="s")
    context = Context(
        index=0,
        token_ids=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.1, -0.2],
        policy_versions=[-1, 0, 0],
        num_prompt_tokens=1,
        num_question_tokens=1,
        num_memory_tokens=0,
        action="look it up",
        searches=[search],
        memory_after="known",
    )
    trajectory = Trajectory(
        id="g/0", group_id="g", member=0, contexts=[context], end_reason=EndReason.MAX_TURNS, answer=None
    )
    question = Question(id="q1", text="Who is it?", golden_answers=["me"])
    write_trajectories(tmp_path / "trajectories.parquet", [Group(id="g", question=question, trajectories=[trajectory])])
    return tmp_path


def test_trace_shows_a_trajectory_turn_by_turn(run, capsys):
    assert main(["trace", str(run), "--question", "Who"]) == 0
    out = capsys.readouterr().out
    assert [line in out for line in ("Who is it?", "look it up", "[T] body", "wrote    known", "max_turns")] == [
        True
    ] * 5


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--question", "absent"], "matches --question"), ([], "does not exist")]
)
def test_trace_says_what_is_missing(run, tmp_path, capsys, arguments, words):
    target = run if arguments else tmp_path / "nothing.parquet"
    assert main(["trace", str(target), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_source_that_is_not_there_is_said_before_anything_heavy_is_imported(tmp_path):
    """One interpreter is given them all, one after the other."""
    here = str(tmp_path)
    no_folder = "retrieval.index is 'nowhere', which is not a folder"
    refused = [
        (["serve", "runs/nothing"], "runs/nothing does not exist; give a run's folder"),
        (["data", "cloze", "nowhere.jsonl", "out"], "nowhere.jsonl does not exist"),
        (["data", "cloze", "nowhere.txt", "out"], "nowhere.txt does not exist"),
        (["data", "cloze", "f", "out", "objectives=2"], "objectives is a setting of a run with a `cloze` section"),
        (["serve", here, "--index", "nowhere"], no_folder),
        (["serve", here, "settings.retrieval.index=nowhere"], no_folder),
        (["serve", here, "budget.max_turns=3"], "budget is of the run, not of the service; write settings.budget"),
        (["export", here, "out", "--step", "15"], "holds those after the learner steps 20 (step-00000040)"),
        (["train", f"{here}/config.yaml", "output=/proc/runs"], "no folder can be made in /proc"),
        (
            ["train", f"{here}/config.yaml", "output=/proc/runs", "compat.question_mark=true"],
            "warning: compat is now called agent.compat; it is read under both names\nerror: output is ",
        ),
        (["model", "import", "nothing", "out"], "nothing is neither a GGUF file nor an installed package"),
    ]
    (tmp_path / "config.yaml").write_text((ROOT / "jobs/configs/quickstart.yaml").read_text())
    made = tmp_path / "checkpoints" / "step-00000040"
    made.mkdir(parents=True)
    state = {"num_updates_done": 40, "ranks": "2 cpu", "position": asdict(Position(step=20))}
    (made / "state.json").write_text(json.dumps(state))
    code = (
        "import contextlib, io, json, sys\nfrom mempipe.cli import main\nfor words in json.loads(sys.argv[1]):\n"
        "    out, said = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):\n        code = main(words)\n"
        "    heavy = [name for name in ('ray', 'torch') if name in sys.modules]\n"
        "    print(json.dumps([code, heavy, out.getvalue(), said.getvalue()]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps([words for words, _ in refused])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (words, message), line in zip(refused, done.stdout.splitlines(), strict=True):
        *ended, said = json.loads(line)
        assert ended == [2, [], ""] and message in said, (words, ended, said)
