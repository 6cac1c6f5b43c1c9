"""Settings: what is refused, and with which sentence."""

from pathlib import Path

import pytest

from mempipe.config import Budget, ConfigError, RunConfig, load_config, parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "jobs" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path):
    assert load_config(path).num_steps > 0


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
        ({"algorithm": {"group_sise": 4}}, ["algorithm.group_sise", "not a setting"]),
        ({"algorithm": {"group_size": "many"}}, ["algorithm.group_size", "'many'", "integer"]),
        ({"algorithm": {"loss": "ppo2"}}, ["algorithm.loss", "'ppo2'", "'grpo'"]),
        ({"algorithm": {"groups_per_step": 10, "updates_per_step": 3}}, ["groups_per_step 10", "updates_per_step 3"]),
        ({"budget": {"context_tokens": 100}}, ["budget.context_tokens is 100", "5879"]),
        ({"retrieval": {"num_passages": 20}}, ["num_passages is 20", "max_passages 10"]),
        ({"sampling": {"top_p": 0.9}}, ["top_p 0.9", "training needs"]),
        ({"ordered": True, "algorithm": {"max_off_policy_steps": 1}}, ["ordered", "max_off_policy_steps 0"]),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_its_value_and_what_is_right(values, words):
    with pytest.raises(ConfigError) as error:
        parse_config(values)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("override", "words"), [("seed", "key=value"), ("=1", "key=value"), ("seed.x=1", "not a section"), ("seed=[", "not YAML")]
)
def test_a_malformed_override_is_refused(tmp_path, override, words):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=words):
        load_config(file, [override])


@pytest.mark.parametrize(("text", "words"), [(None, "cannot read"), ("a: [", "not YAML"), ("- 1", "expected a mapping")])
def test_an_unreadable_file_is_refused(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_the_parts_of_a_context_may_fill_it_exactly():
    parts = {"question_tokens": 1, "memory_tokens": 2, "action_tokens": 3, "memory_message_tokens": 4, "observation_tokens": 5}
    assert Budget(**parts, context_tokens=15).context_tokens == 15
    with pytest.raises(ValueError, match="need 15"):
        Budget(**parts, context_tokens=14)


def test_defaults_are_the_published_settings():
    config = RunConfig()
    assert (config.algorithm.group_size, config.algorithm.kl_coef, config.algorithm.clip_low, config.optimizer.lr) == (5, 0.001, 0.2, 1e-6)
    assert (config.budget.memory_tokens, config.budget.max_turns, config.budget.context_tokens) == (1024, 5, 8192)
