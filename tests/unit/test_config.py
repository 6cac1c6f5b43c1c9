"""Settings: what is refused, and with which sentence."""

import ast
import os
import re
from pathlib import Path

import pytest
import yaml

from mempipe.agents.memsearcher import MemSearcherCompat
from mempipe.agents.registry import BUILT_IN, agent_spec
from mempipe.config import RunConfig
from mempipe.loader import SHIPPED, load_config, load_index_config, load_job, load_values, parse_config, read_values
from mempipe.masking.config import AskedClozeConfig
from mempipe.settings import ConfigError, OldName
from mempipe.studies.chain import chain_runs
from mempipe.template import config_lines

CONFIGS = sorted((Path(__file__).parents[2] / "jobs" / "configs").glob("*.yaml"))
KEYS = {path: yaml.safe_load(path.read_text()).keys() for path in CONFIGS}


@pytest.mark.parametrize("path", [path for path in CONFIGS if "num_steps" in KEYS[path]], ids=lambda path: path.stem)
def test_every_shipped_run_is_valid(path):
    assert load_config(path).num_steps > 0


def test_attempts_of_the_shipped_runs_that_share_a_chunk_train_on_it_once(monkeypatch):
    monkeypatch.chdir(CONFIGS[0].parents[2])
    runs = {path.stem: load_config(path) for path in CONFIGS if "num_steps" in KEYS[path]}
    for path in (path for path in CONFIGS if "stages" in KEYS[path]):
        runs |= {f"{path.stem}: {run.name}": run for run in chain_runs(load_job(path, kind="chain")[1])}
    sharing = {name: run.learner.share_prefixes for name, run in runs.items() if getattr(run.agent, "chunk_first", 0)}
    assert {"memtrain_qwen3-4b", "memtrain_smollm2", "chain_memtrain_memagent: memagent"} <= sharing.keys()
    assert [name for name, shares in sharing.items() if not shares] == []


@pytest.mark.parametrize("path", [path for path in CONFIGS if "corpus" in KEYS[path]], ids=lambda path: path.stem)
def test_every_shipped_index_is_valid(path):
    assert load_job(path, kind="index")[1].corpus


def test_overrides_reach_nested_settings_as_yaml_values(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\nalgorithm: {group_size: 4}\n")
    config = load_config(file, ["algorithm.kl_coef=0.5", "generation.enforce_eager=true", "name=x"])
    assert (config.seed, config.name, config.algorithm.group_size, config.algorithm.kl_coef) == (3, "x", 4, 0.5)
    assert config.generation.enforce_eager is True


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algoritm": {}}, ["algoritm", "not a setting"]),
        ({"algorithm": {"group_sise": 4}}, ["algorithm.group_sise", "not a setting", "algorithm.group_size"]),
        ({"algorithm": {"group_size": "many"}}, ["algorithm.group_size", "'many'", "integer"]),
        ({"algorithm": {"loss": "ppo2"}}, ["algorithm.loss", "'ppo2'", "'grpo'"]),
        ({"algorithm": {"groups_per_step": 10, "updates_per_step": 3}}, ["groups_per_step 10", "updates_per_step 3"]),
        (
            {"generation": {"engine_process": "shared", "tensor_parallel": 2}},
            ["generation.engine_process is shared", "tensor_parallel 2", "auto or own"],
        ),
        ({"budget": {"context_tokens": 100}}, ["budget.context_tokens is 100", "5879"]),
        ({"agent": {"name": "react", "compat": {"preset": "mem1"}}}, ["agent.compat.preset is 'mem1'", "'search-r1'"]),
        ({"agent": {"compat": {"preset": "memsearcher"}}}, ["agent.compat.preset", "'memsearcher-train'"]),
        ({"agent": {"compat": {"preset": []}}}, ["agent.compat.preset"]),
        ({"agent": {"compat": {"num_passages": 11}}}, ["agent.compat.num_passages is 11", "max_passages 10"]),
        (
            {"agent": {"compat": {"answer_sentence": True}}},
            ["agent.compat.answer_sentence", "'memsearcher'", "memagent"],
        ),
        ({"agent": {"name": "mem1", "chunk_first": True}}, ["agent.chunk_first", "'mem1'", "memagent"]),
        ({"budget": {"chunk_tokens": 5}}, ["budget.chunk_tokens", "'memsearcher'", "memagent"]),
        ({"agent": {"name": "memsercher"}}, ["agent.name is 'memsercher'", "'memsearcher'"]),
        ({"agent": {"name": "nowhere.agent"}}, ["agent.name is 'nowhere.agent'", "cannot be imported"]),
        ({"agent": {"name": "mempipe.types"}}, ["agent.name is 'mempipe.types'", "AGENT"]),
        (
            {"compat": {"num_passages": 2}, "agent": {"compat": {"num_passages": 3}}},
            ["compat.num_passages is 2", "agent.compat.num_passages is 3", "remove compat.num_passages"],
        ),
        ({"group_size": 4}, ["group_size", "algorithm.group_size"]),
        ({"reward": {"format": "search_r1"}}, ["reward.format is 'search_r1'", "reward.answer is 'f1'"]),
        ({"reward": {"format": "search_r1", "answer": "em"}}, ["reward.format is 'search_r1'", "'memsearcher'"]),
        ({"retrieval": {"num_passages": 20}}, ["num_passages is 20", "max_passages 10"]),
        ({"sampling": {"top_p": 0.9}}, ["top_p 0.9", "training needs"]),
        ({"ordered": True, "algorithm": {"max_off_policy_steps": 1}}, ["ordered", "max_off_policy_steps 0"]),
        (
            {"ordered": True, "algorithm": {"max_off_policy_steps": 0}, "generation": {"num_threads": 2}},
            ["ordered needs generation.num_threads 1, got 2"],
        ),
        ({"generation": {"updates_in_flight": True}, "algorithm": {"max_off_policy_steps": 0}}, ["updates_in_flight"]),
        ({"model": {"lora_rank": 8, "lora_merge": True}}, ["model.lora_merge is true", "model.dtype bfloat16"]),
        ({"num_steps": True}, ["num_steps is true", "a number, not true or false"]),
        ({"optimizer": {"betas": [0.9, False]}}, ["optimizer.betas is [0.9, False]", "a number, not true or false"]),
        ({"budget": {"memory_choices": [1, True]}}, ["budget.memory_choices", "a number, not true or false"]),
        ({"optimizer": {"lr": float("inf")}}, ["optimizer.lr is inf", "a finite number"]),
        ({"warm_start": {"min_score": float("nan")}}, ["warm_start.min_score is nan", "a finite number"]),
        ({"num_steps": None}, ["num_steps is null", "integer"]),
        ({"learner": [1]}, ["learner is [1]", "a section of settings"]),
        ({"agent": {"name": [1]}}, ["agent.name is [1]"]),
        ({"agent": {"name": [1]}, "sede": 1}, ["sede is not a setting; did you mean seed?"]),
        ({1: 2}, ["the key 1 is not a word"]),
        ([1], ["expected settings by name, got [1]"]),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_its_value_and_what_is_right(values, words):
    with pytest.raises(ConfigError) as error:
        parse_config(values)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "agent",
    [{}, {"agent": None}, {"agent": {"compat": {"num_passages": 3}}}, {"agent": {"compat": {"question_mark": True}}}],
)
def test_a_setting_is_read_under_its_old_name_and_its_new_one_is_said(agent):
    with pytest.warns(OldName, match=r"^compat is now called agent\.compat; it is read under both names$"):
        config = parse_config({"compat": {"num_passages": 3}, **agent})
    assert config.agent.compat == MemSearcherCompat(num_passages=3, question_mark="question_mark" in str(agent))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "key=value"),
        ("=1", "key=value"),
        ("seed.x=1", "not a section"),
        ("seed=[", "not YAML"),
        ("seed=2024-99-99", "seed is '2024-99-99': should be a valid integer"),
        ("seed=-1", "seed is -1: should be greater than or equal to 0"),
        ("seed=4294967296", "seed is 4294967296: should be less than 4294901760"),
        ("optimizer.betas=[0.9,1.0]", r"optimizer\.betas\.1 is 1\.0: should be less than 1"),
        ("optimizer.betas=[-0.1,0.9]", r"optimizer\.betas\.0 is -0\.1: should be greater than or equal to 0"),
        ("seed={a: 1, a: 2}", "not YAML"),
    ],
)
def test_a_malformed_override_is_refused(tmp_path, override, words):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=words):
        load_config(file, [override])


@pytest.mark.parametrize("name", ["20261127", "2026-11-27", "007", "12:30", "1_000", "0x1f", "1e5", "7"])
def test_a_name_of_digits_is_read_as_it_was_written(tmp_path, name):
    """As in `name=$SLURM_JOB_ID` and `name=$(date +%F)`."""
    file = tmp_path / "c.yaml"
    file.write_text(f"name: {name}\n")
    assert load_config(file).name == name
    file.write_text("seed: 1_000\n")
    changed = load_config(file, [f"name={name}"])
    assert (changed.name, changed.seed) == (name, 1000)


def test_numbers_among_texts_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("agent: {mcp_servers: [{command: npx, args: [--port, 8080, -v]}]}\n")
    (server,) = load_config(file).agent.mcp_servers
    assert server.args == ["--port", "8080", "-v"]
    file.write_text("agent: {mcp_servers: [{command: npx, args: [--port, 80.5]}]}\n")
    with pytest.raises(ConfigError, match=r"args\.1 is 80\.5"):
        load_config(file)


def test_a_number_where_a_list_of_texts_belongs_stays_a_number_in_the_error(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {lora_targets: 7}\n")
    with pytest.raises(ConfigError, match="is 7: should be a valid"):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("name=on", """name is true, but takes a text: "true" in a file, 'name="true"' on a command line"""),
        ("name=1.10", """name is 1.1, but takes a text: "1.1" in a file, 'name="1.1"' on a command line"""),
        (
            "model.source=",
            """model.source is null, but takes a text: "" in a file, 'model.source=""' on a command line""",
        ),
    ],
)
def test_what_yaml_does_not_read_as_a_text_is_refused_with_the_way_to_write_it(tmp_path, override, sentence):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("a: [", "not YAML"),
        ("- 1", "expected a mapping"),
        ("[]", "expected a mapping"),
        ("? [a]\n: 1", "not YAML: the key in line 1 is a list or a mapping"),
        ("a: 1\nb: &x {c: *x}", "not YAML: what begins in line 2 holds itself"),
        ("a: !!timestamp 2024-99-99", r"not YAML: ValueError: month must be in 1\.\.12"),
        ("a: !!int ''", "not YAML"),
        ("[" * 5000, "not YAML: RecursionError"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_a_pipe_is_a_config_and_a_device_is_none():
    """As `mempipe doctor <(sed ... CONFIG)` gives one, which two readings need."""
    read, write = os.pipe()
    os.write(write, b"name: piped\nworld: {}\n")
    os.close(write)
    kind, config = load_job(f"/dev/fd/{read}")
    os.close(read)
    assert (kind.command, config.name) == ("mempipe train", "piped")
    with pytest.raises(ConfigError, match=r"^cannot read config /dev/zero: it is a device, not a YAML file$"):
        load_job("/dev/zero")


def test_what_is_meant_in_place_of_a_config_is_said(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xa8")
    for name, words in (
        ("run", "run: it is a folder, not a YAML file"),
        ("binary.yaml", "it is not UTF-8 text (byte 0 is 0xa8)"),
        ("num_steps=3", "num_steps=3: No such file or directory; the config comes first, then the settings"),
    ):
        with pytest.raises(ConfigError, match=f"cannot read config .*{re.escape(words)}$"):
            load_config(tmp_path / name)
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"run: it is a folder; its settings are in .*/run/config\.yaml$"):
        load_config(tmp_path / "run")


def test_a_config_that_comes_with_mempipe_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    shipped = {file.name: read_values(file) for file in SHIPPED.glob("*.yaml")}
    assert "quickstart.yaml" in shipped
    monkeypatch.chdir(tmp_path)
    for name, values in shipped.items():
        assert read_values(f"jobs/configs/{name}") == values
        assert read_values(name.removesuffix(".yaml")) == read_values(name) == values
    Path("quickstart.yaml").write_text("name: mine\n")
    assert read_values("quickstart.yaml") == {"name": "mine"}
    with pytest.raises(ConfigError, match=r"quickstrat: No such file or directory; .* come with mempipe: quickstart"):
        read_values("quickstrat")
    with pytest.raises(ConfigError, match=r"^quickstart is not here, and the config of this name in mempipe describes"):
        load_values("quickstart", kind="evaluation")
    for elsewhere in ("elsewhere/quickstart", f"{tmp_path}/quickstart"):
        with pytest.raises(ConfigError, match=r"No such file or directory$"):
            read_values(elsewhere)
    assert load_index_config("index_wiki18_e5") == load_index_config(SHIPPED / "index_wiki18_e5.yaml")


def test_a_section_that_a_file_leaves_empty_has_its_defaults_and_takes_overrides(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("agent:\nreward:\nbudget:\nlearner:\ncloze: null\nworld: null\n")
    assert load_config(file) == RunConfig() and load_config(file).cloze is None
    config = load_config(file, ["cloze.two_passages=0.5", "learner.num_ranks=2"])
    assert config.cloze is not None and config.cloze.two_passages == 0.5 and config.learner.num_ranks == 2


@pytest.mark.parametrize("agent", BUILT_IN)
def test_what_config_writes_takes_overrides_of_sections_that_are_not_set(tmp_path, agent):
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(config_lines(agent)))
    assert load_config(file, ["cloze.two_passages=0.5"]).cloze == AskedClozeConfig(two_passages=0.5)


def test_a_section_may_merge_another_and_an_override_of_one_leaves_the_other_alone(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: &m {path: x}\nb: &b\n  <<: *m\n  path: y\nc: {<<: *b, d: 1}\ne: *b\n")
    assert load_values(file) == {
        "model": {"path": "x"},
        "b": {"path": "y"},
        "c": {"path": "y", "d": 1},
        "e": {"path": "y"},
    }
    changed = load_values(file, ["e.path=z"])
    assert changed["e"] == {"path": "z"} and changed["b"] == {"path": "y"}
    file.write_text("model: &m {path: x}\nb:\n  <<: *m\n  path: y\n  path: z\n")
    with pytest.raises(ConfigError, match=r"the key 'path' is duplicated, the second time in line 5"):
        load_values(file)


SMALL = {
    "question_tokens": 1,
    "memory_tokens": 2,
    "action_tokens": 3,
    "memory_message_tokens": 4,
    "observation_tokens": 5,
    "chunk_tokens": 6,
    "document_tokens": 7,
}


@pytest.mark.parametrize(
    ("agent", "needed", "parts"),
    [
        ("memsearcher", 15, "question 1 + memory 2 + action 3 + observation 5 + memory message 4"),
        ("memagent", 13, "question 1 + memory 2 + chunk 6 + memory message 4"),
        ("mem1", 12, "question 1 + state 3 + observation 5 + action 3"),
        ("react", 12, "question 1 + action 3 + observation 5 + answer 3"),
        ("full_text", 11, "question 1 + document 7 + answer 3"),
    ],
)
def test_the_parts_of_an_agents_largest_context_may_fill_it_exactly(agent, needed, parts):
    limits = {name: value for name, value in SMALL.items() if name in agent_spec(agent).budget.model_fields}
    values = {"agent": {"name": agent}, "budget": {**limits, "context_tokens": needed}}
    assert sum(parse_config(values).budget.parts().values()) == needed
    message = f"budget.context_tokens is {needed - 1}, but {parts} tokens need {needed} before the template"
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config({"agent": {"name": agent}, "budget": {**limits, "context_tokens": needed - 1}})


def test_memagents_largest_context_may_be_the_last_one():
    limits = {name: value for name, value in SMALL.items() if name not in ("observation_tokens", "document_tokens")}
    values = {"agent": {"name": "memagent"}, "budget": {**limits, "action_tokens": 11, "context_tokens": 14}}
    assert parse_config(values).budget.parts() == {"question": 1, "memory": 2, "answer": 11}


def test_the_memory_message_follows_the_memory_unless_it_is_set():
    assert parse_config({"budget": {"memory_tokens": 100}}).budget.parts()["memory message"] == 164
    assert (
        parse_config({"budget": {"memory_tokens": 100, "memory_message_tokens": 110}}).budget.parts()["memory message"]
        == 110
    )


def test_a_compat_preset_fills_the_flags_and_a_named_flag_wins():
    compat = MemSearcherCompat.model_validate({"preset": "memsearcher-train", "question_mark": False})
    assert (compat.box_in_thought, compat.question_mark, compat.num_passages, compat.bad_memory) == (
        True,
        False,
        10,
        "end",
    )
    assert compat.active() == ["num_passages: 10", "box_in_thought: True", "literal_newlines: True"]
    assert MemSearcherCompat().active() == []


PRESETS = [
    (agent, preset, flags)
    for agent in BUILT_IN
    for preset, flags in agent_spec(agent).config.model_fields["compat"].default.PRESETS.items()
    if preset != "none"
]


@pytest.mark.parametrize(("agent", "preset", "flags"), PRESETS, ids=[preset for _, preset, _ in PRESETS])
def test_every_compat_preset_changes_what_it_says(agent, preset, flags):
    config = parse_config({"agent": {"name": agent, "compat": {"preset": preset}}})
    assert flags and sorted(config.agent.compat.active()) == sorted(f"{name}: {value}" for name, value in flags.items())


@pytest.mark.parametrize("agent", BUILT_IN)
def test_the_reward_is_the_published_one_unless_it_is_set(agent):
    assert parse_config({"agent": {"name": agent}}).reward.model_dump().items() >= agent_spec(agent).reward.items()
    assert parse_config({"agent": {"name": agent}, "reward": {"wrong_answer": 0.5}}).reward.wrong_answer == 0.5


def test_a_key_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\nname: x\nseed: 4\n")
    with pytest.raises(ConfigError, match=r"'seed' is duplicated, the second time in line 3"):
        load_config(file)


def test_defaults_are_the_published_settings():
    config = RunConfig()
    assert (config.algorithm.group_size, config.algorithm.kl_coef, config.algorithm.clip_low, config.optimizer.lr) == (
        5,
        0.001,
        0.2,
        1e-6,
    )
    assert (config.budget.memory_tokens, config.budget.max_turns, config.budget.context_tokens) == (1024, 5, 8192)


def test_the_tokens_of_a_step_are_judged_as_the_canary_unless_set():
    assert parse_config({"model": {"dtype": "bfloat16"}}).mismatch_tolerance == 0.05
    assert parse_config({"generation": {"canary_tolerance": 0.2}}).mismatch_tolerance == 0.2
    assert parse_config({"generation": {"canary_tolerance": 0.2, "mismatch_tolerance": 0.4}}).mismatch_tolerance == 0.4
    with pytest.raises(ConfigError, match=r"generation\.mismatch_tolerance"):
        parse_config({"generation": {"mismatch_tolerance": 0}})


def test_the_canary_is_as_strict_as_the_dtype_allows_unless_set():
    assert parse_config({"model": {"dtype": "float32"}}).canary_tolerance == 0.001
    assert parse_config({"model": {"dtype": "bfloat16"}}).canary_tolerance == 0.1
    assert parse_config({"generation": {"canary_tolerance": 0.2}}).canary_tolerance == 0.2


def test_the_number_of_settings_does_not_grow_unnoticed():
    """A new setting needs an explanation, a default, a check and a test: raise the number when it is worth them."""
    classes = [
        node
        for path in sorted((Path(__file__).parents[2] / "mempipe").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    sections, known = {"Section"}, 0
    while known < len(sections):  # until no class is found whose base is a section
        known = len(sections)
        sections |= {each.name for each in classes if {ast.unparse(base) for base in each.bases} & sections}
    settings = [
        f"{each.name}.{ast.unparse(line.target)}"
        for each in classes
        if each.name in sections - {"Section"}
        for line in each.body
        if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
    ]
    assert len(settings) <= 366
