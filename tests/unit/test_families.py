"""Families of models: what is scored as transformers does, what the chat templates do, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from benchmarks.families import FAMILIES, Row, measure, save_family, table
from mempipe.actors.standing import Makeup, Weights
from mempipe.checks.models import check_adapter, check_architecture
from mempipe.engines.architectures import logit_factor, refusal
from mempipe.engines.config import ModelConfig
from mempipe.engines.model import load_policy, score
from mempipe.loader import parse_config
from mempipe.planning.capacity import model_shape, trained_matrices, trained_parameters
from mempipe.settings import ConfigError

TRAINED = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name in FAMILIES if name not in TRAINED]


@pytest.mark.parametrize("name", TRAINED)
async def test_a_family_is_scored_as_transformers_does_and_calls_tools(name, tmp_path):
    save_family(FAMILIES[name], tmp_path)
    row = await measure(name, tmp_path, with_engine=False)
    assert row.is_expected and row.learner != "" and row.tools == "called"


@pytest.mark.parametrize("name", REFUSED)
async def test_a_family_is_refused_in_a_sentence_that_names_the_setting(name, tmp_path):
    save_family(FAMILIES[name], tmp_path)
    row = await measure(name, tmp_path)
    assert row.is_expected and row.refused.startswith("model.path ") and "\n" not in row.refused
    with pytest.raises(ConfigError) as raised:
        load_policy(ModelConfig(path=str(tmp_path)))
    assert FAMILIES[name].refused in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        "Qwen3_5TextConfig", "Qwen3NextConfig", "OlmoHybridConfig", "FalconH1Config", "FalconMambaConfig",
        "MambaConfig", "Mamba2Config", "BambaConfig", "Zamba2Config", "NemotronHConfig", "RecurrentGemmaConfig",
        "RwkvConfig", "xLSTMConfig", "JambaConfig", "GraniteMoeHybridConfig",
    ],
)  # fmt: skip
def test_networks_that_carry_a_state_are_refused_by_their_defaults(config):
    values = getattr(transformers, config)().to_dict()
    assert "carry a state" in refusal("m", values) or "mixture of experts" in refusal("m", values)


@pytest.mark.parametrize("config", ["BloomConfig", "CodeGenConfig", "MptConfig", "NemotronConfig", "StableLmConfig"])
def test_networks_whose_attention_takes_no_packed_rows_are_refused(config):
    assert "contexts would read each other" in refusal("m", getattr(transformers, config)().to_dict())


def test_learned_sinks_of_attention_are_refused_before_a_start():
    values = transformers.GraniteSWAConfig().to_dict()
    assert "uses attention with sinks" in refusal("m", values)


def test_a_language_model_inside_another_config_is_looked_at_too():
    values = {"model_type": "some_vl", "text_config": {"layer_types": ["linear_attention", "full_attention"]}}
    assert "(linear_attention)" in refusal("m", values)
    assert refusal("m", {"model_type": "some_vl", "text_config": {"layer_types": ["full_attention"]}}) == ""


def test_a_quantized_model_is_refused(tmp_path):
    values = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert "model.path 'm' is quantized (fp8), and rounded weights cannot be trained" in refusal("m", values)
    assert refusal("m", {**values, "quantization_config": None}) == ""
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "is quantized (hf_quant_config.json), and rounded weights" in refusal(str(tmp_path), {"model_type": "qwen3"})


def test_logits_are_scaled_as_the_network_does():
    assert logit_factor({"model_type": "granite", "logits_scaling": 8.0}) == 0.125
    assert logit_factor({"model_type": "cohere2", "logit_scale": 0.25}) == 0.25
    assert logit_factor({"model_type": "qwen2"}) == 1.0
    assert logit_factor({"model_type": "hyperclovax", "logits_scaling": 0.25}) == 0.25
    assert logit_factor({"model_type": "minicpm3", "dim_model_base": 256, "hidden_size": 2560}) == 0.1
    assert logit_factor({"model_type": "granite4_vision", "text_config": {"logits_scaling": 8.0}}) == 0.125


def test_a_dense_granite_4_is_scored_as_transformers_does(tmp_path):
    """Its network is that of the mixtures, without experts, and its logits are scaled."""
    network = transformers.GraniteMoeHybridConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, shared_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["attention", "attention"], position_embedding_type="rope", logits_scaling=8.0,
        embedding_multiplier=12.0, initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(network).save_pretrained(tmp_path)
    ids = [[3, 14, 15, 92, 65, 35, 89, 79]]
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"))
    found = score(policy, ids, loss_masks=[[0] + [1] * 7], temperature=1.0, max_tokens=99)[0][1:]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = plain(torch.tensor(ids)).logits[0, :-1].log_softmax(-1)
    assert found == pytest.approx([row[i].item() for row, i in zip(logprobs, ids[0][1:], strict=True)], abs=1e-4)


def test_contexts_beyond_which_longrope_rotates_otherwise_are_refused(tmp_path):
    """As config.json of Phi-3.5 and of Phi-4-mini has it, and as transformers 5 writes it."""
    scaling = {"long_factor": [2.0], "short_factor": [1.0]}
    for values in (
        {"rope_scaling": {**scaling, "type": "longrope"}, "original_max_position_embeddings": 4096},
        {"rope_parameters": {**scaling, "rope_type": "longrope", "original_max_position_embeddings": 4096}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", **values}))
        assert check_architecture(str(tmp_path), context_tokens=4096) == []
        (finding,) = check_architecture(str(tmp_path), context_tokens=4097)
        assert (
            finding.fatal and "has LongRoPE" in finding.text and "lower budget.context_tokens to 4096" in finding.text
        )


def test_an_engine_that_longrope_makes_another_network_is_not_shared(tmp_path):
    """A memory agent and one with the whole text, of the same model in one evaluation."""
    scaling = {"long_factor": [2.0], "short_factor": [1.0], "rope_type": "longrope"}
    for values, alike in (({**scaling, "original_max_position_embeddings": 8192}, False), ({}, True)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "rope_parameters": values}))
        configs = [
            parse_config({"model": {"path": str(tmp_path)}, "budget": {"context_tokens": tokens}})
            for tokens in (8192, 16384)
        ]
        assert (Makeup.of(configs[0]) == Makeup.of(configs[1])) is alike


@pytest.mark.parametrize("named_in", ["config.json", "hf_quant_config.json"])
def test_an_engine_of_quantized_weights_is_not_given_those_of_another_model(tmp_path, named_in):
    made = []
    for name, quantized in (("plain", False), ("first", True), ("second", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
        (tmp_path / name / "config.json").write_text("{}")
        if quantized:
            (tmp_path / name / named_in).write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
        made.append(parse_config({"model": {"path": str(tmp_path / name)}}))
    plain, first, second = map(Makeup.of, made)
    assert plain.engines != first.engines == second.engines
    assert [Weights.of(config).handle is None for config in made] == [False, True, True]


def test_contexts_beyond_coheres_sliding_window_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2", "sliding_window": 4096}))
    assert check_architecture(str(tmp_path), context_tokens=4096) == []
    (finding,) = check_architecture(str(tmp_path), context_tokens=8192)
    assert finding.fatal and "lower budget.context_tokens to 4096" in finding.text


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("phi3", ["q_proj", "o_proj"], "names q_proj, which phi3 does not have; its linear layers are down_proj"),
        (
            "glm4",
            ["o_proj", "gate_up_proj"],
            "names gate_up_proj, and vLLM serves no adapter of that for glm4; leave it",
        ),
        ("qwen2", ["layers.0.self_attn.q_proj", "embed_tokens"], "names embed_tokens, which qwen2 does not have"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_doctor_and_learner(name, targets, said, tmp_path):
    save_family(FAMILIES[name], tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32", lora_rank=2, lora_targets=targets)
    (finding,) = check_adapter(model)
    assert finding.fatal and said in finding.text
    with pytest.raises(ConfigError, match=said):
        load_policy(model)
    fitting = model.model_copy(update={"lora_targets": list(FAMILIES[name].lora_targets)})
    assert check_adapter(fitting) == []
    assert check_adapter(fitting.model_copy(update={"lora_rank": 0, "lora_targets": ["x"]})) == []


@pytest.mark.parametrize("name", TRAINED)
def test_the_parameters_of_an_adapter_are_those_that_peft_makes(name, tmp_path):
    """Also of fused layers: those of phi3, and those of glm4, whose adapters must be merged."""
    save_family(FAMILIES[name], tmp_path)
    targets = [*FAMILIES[name].lora_targets, *(["gate_up_proj"] if name == "glm4" else [])]
    model = ModelConfig(path=str(tmp_path), dtype="float32", lora_rank=2, lora_targets=targets, lora_merge=True)
    made = [parameter for parameter in load_policy(model).parameters() if parameter.requires_grad]
    shape = model_shape(model)
    assert shape is not None
    assert sorted(trained_matrices(model, shape)) == sorted(parameter.numel() for parameter in made)
    assert trained_parameters(model, shape) > 0
    whole = model.model_copy(update={"lora_rank": 0, "lora_merge": False})
    matrices = [parameter for parameter in load_policy(whole).parameters() if parameter.ndim == 2]
    assert sorted(shape.matrices) == sorted(parameter.numel() for parameter in matrices)


def test_a_row_is_expected_only_when_every_column_is_right():
    good = {"template": "system text", "stops": "`<|end|>`", "tools": "called", "learner": 1e-6, "engine": 1e-6}
    assert Row(family="llama", **good).is_expected
    for wrong in ({"learner": 1e-2}, {"engine": "fails: x"}, {"tools": "fails: y"}, {"refused": "model.path"}):
        assert not Row(family="llama", **good | wrong).is_expected
    assert not Row(family="gemma2", **good).is_expected
    (line,) = table([Row(family="llama", **good)], header=False)
    assert line == "| llama | 1e-06 | 1e-06 |  |  | system text | `<\\|end\\|>` | called |"
