"""Which model families work: engine, learner, chat template, stop tokens, tools, weight sync and LoRA, by a random tiny
model of each family.

    python -m benchmarks.families [--only llama gemma3] [--no-engine]

A family's model has its own network (sliding windows, normalised queries, scaled logits) in small, and a tokenizer of
bytes with the family's role tokens and chat template. Weights are random and large enough that each of them moves the
log-probs. Each row is the result of: an engine and a learner of the same folder, one learner step, one sync; the same
with an adapter; one attempt of MemSearcher that a script plays. The columns are explained in docs/families.md. The exit
code is 1 when a family does otherwise than its row of FAMILIES says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from mempipe.agents.protocol import ChatTemplateError
from mempipe.checks.models import check_architecture
from mempipe.engines.config import GenerationConfig, LearnerConfig, ModelConfig, OptimizerConfig
from mempipe.engines.generator import Generator
from mempipe.engines.learner import Learner
from mempipe.engines.learner_settings import LearnerSettings
from mempipe.engines.proof import canary_gap, check_held, joined
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.engines.weights import pack_weights
from mempipe.loader import parse_config
from mempipe.rl.config import AlgorithmConfig
from mempipe.rl.packing import MicroBatch, pack_step
from mempipe.rollout import make_renderer
from mempipe.settings import ConfigError
from mempipe.types import Completion, EndReason, FinishReason, Passage, Question, SearchResult, TrainingSample

TOLERANCE = 1e-4
"""Largest difference of a log-prob in float32 that counts as equal."""
MAX_MODEL_LEN = 256
WINDOW = 64
"""Tokens of sliding windows, less than the longest sequence that is scored."""
SIZES: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_MODEL_LEN,
    initializer_range=0.1,
)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]\
{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"""
OLMO2 = """\
{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
GRANITE = """\
{% for message in messages %}<|start_of_role|>{{ message['role'] }}<|end_of_role|>{{ message['content'] }}\
<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family in small. `template` is one of trl's, or its text; role tokens are `special`."""

    example: str
    config: str
    """The name of its config class in transformers."""
    network: dict[str, Any] = field(default_factory=dict)
    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    stops: tuple[str, ...] = ()
    """Stop tokens of its generation_config.json in addition to `eos`."""
    lora_targets: tuple[str, ...] = tuple(ModelConfig().lora_targets)
    engine_process: Literal["auto", "own"] = "auto"
    """own where vLLM runs the network by transformers: it changes classes of transformers in its process."""
    refused: str = ""
    """A part of the sentence that refuses it; "" for a family that is trained."""


QWEN: dict[str, Any] = dict(template="qwen2_5", special=CHATML, eos="<|im_end|>")
FAMILIES: dict[str, Family] = {
    "qwen2": Family(example="Qwen/Qwen2.5-3B-Instruct", config="Qwen2Config", **QWEN),
    "qwen3": Family(
        example="Qwen/Qwen3-4B-Instruct-2507",
        config="Qwen3Config",
        network={"head_dim": 64},
        **QWEN | {"template": "qwen3_instruct_2507"},
    ),
    "llama": Family(
        example="meta-llama/Llama-3.1-8B-Instruct",
        config="LlamaConfig",
        template="llama3_1",
        special=LLAMA3,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Family(
        example="mistralai/Mistral-7B-Instruct-v0.3",
        config="MistralConfig",
        network={"sliding_window": WINDOW},
        template=MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
    ),
    "gemma3": Family(
        example="google/gemma-3-1b-it",
        config="Gemma3TextConfig",
        network={
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        template="gemma3",
        special=GEMMA,
        bos="<bos>",
        eos="<eos>",
        stops=("<end_of_turn>",),
    ),
    "phi3": Family(
        example="microsoft/Phi-3.5-mini-instruct",
        config="Phi3Config",
        network={"original_max_position_embeddings": MAX_MODEL_LEN},
        template="phi3",
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>",),
        lora_targets=FUSED,
    ),
    "olmo2": Family(
        example="allenai/OLMo-2-0425-1B-Instruct",
        config="Olmo2Config",
        template=OLMO2,
        special=("<|endoftext|>",),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        engine_process="own",
    ),
    "granite": Family(
        example="ibm-granite/granite-3.3-2b-instruct",
        config="GraniteConfig",
        network={
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.03125,
        },
        template=GRANITE,
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        eos="<|end_of_text|>",
    ),
    "glm4": Family(
        example="zai-org/GLM-4-9B-0414",
        config="Glm4Config",
        network={"head_dim": 32, "partial_rotary_factor": 0.5},
        template="glm4moe",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),  # vLLM refuses one of gate_up_proj
    ),
    "cohere2": Family(
        example="CohereLabs/c4ai-command-r7b-12-2024",
        config="Cohere2Config",
        network={
            "logit_scale": 0.25,
            "sliding_window": MAX_MODEL_LEN,  # see `mempipe.checks.models.check_architecture`
            "layer_types": ["sliding_attention", "full_attention"],
        },
        template="cohere2",
        special=(
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        stops=("<|END_RESPONSE|>",),  # the user adds it: the published file has the end of the turn alone
    ),
    "gemma2": Family(
        example="google/gemma-2-2b-it",
        config="Gemma2Config",
        network={"head_dim": 32},
        template="gemma",
        special=GEMMA,
        bos="<bos>",
        eos="<eos>",
        stops=("<end_of_turn>",),
        refused="uses attn_logit_softcapping 50.0",
    ),
    "qwen3_moe": Family(
        example="Qwen/Qwen3-30B-A3B-Instruct-2507",
        config="Qwen3MoeConfig",
        network=EXPERTS,
        refused="mixture of experts (qwen3_moe, 4 experts)",
        **QWEN,
    ),
    "mixtral": Family(
        example="mistralai/Mixtral-8x7B-Instruct-v0.1",
        config="MixtralConfig",
        network={"num_local_experts": 4},
        template=MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        refused="mixture of experts (mixtral, 4 experts)",
    ),
    "gpt_oss": Family(
        example="openai/gpt-oss-20b",
        config="GptOssConfig",
        network={"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
        template="gptoss",
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        eos="<|return|>",
        refused="mixture of experts (gpt_oss, 4 experts)",
    ),
    "qwen3_next": Family(
        example="Qwen/Qwen3-Next-80B-A3B-Instruct",
        config="Qwen3NextConfig",
        network=EXPERTS | {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
        refused="mixture of experts (qwen3_next, 4 experts)",
        **QWEN,
    ),
    "lfm2": Family(
        example="LiquidAI/LFM2-1.2B",
        config="Lfm2Config",
        network={"layer_types": ["conv", "full_attention"]},
        template="lfm2",
        special=("<|startoftext|>", *CHATML),
        bos="<|startoftext|>",
        eos="<|im_end|>",
        refused="layers that carry a state from token to token (conv)",
    ),
}


@dataclass(kw_only=True)
class Row:
    """The results of a family. Numbers are the largest |Δ log-prob|; a text that starts with "fails" is an error."""

    family: str
    template: str = ""
    stops: str = ""
    tools: str = ""
    learner: float | str = ""
    engine: float | str = ""
    sync: str = ""
    adapter: str = ""
    refused: str = ""

    @property
    def is_expected(self) -> bool:
        """Returns whether a trained family works everywhere, and another one is refused as its row says."""
        expected = FAMILIES[self.family].refused
        if expected or self.refused:
            return bool(expected) and expected in self.refused
        texts = (self.template, self.stops, self.tools, self.sync, self.adapter)
        gaps = [gap for gap in (self.learner, self.engine) if gap != ""]
        return not any(text.startswith("fails") for text in texts) and all(
            isinstance(gap, float) and gap <= TOLERANCE for gap in gaps
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--no-engine", action="store_true", help="leave out what needs an engine")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            save_family(FAMILIES[name], Path(folder))
            rows.append(asyncio.run(measure(name, Path(folder), with_engine=not arguments.no_engine)))
            print("\n".join(table([rows[-1]], header=len(rows) == 1)), flush=True)
    return 0 if all(row.is_expected for row in rows) else 1


def table(rows: Sequence[Row], *, header: bool = True) -> list[str]:
    """Returns the rows as Markdown."""
    head = ["family", "learner", "engine", "sync", "adapter", "template", "stop tokens", "tools"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)] if header else []
    for row in rows:
        if row.refused:
            lines.append(f"| {row.family} | refused: {row.refused} |" + " |" * (len(head) - 2))
            continue
        gaps = [f"{gap:.0e}" if isinstance(gap, float) else gap for gap in (row.learner, row.engine)]
        cells = [row.family, *gaps, row.sync, row.adapter, row.template, row.stops, row.tools]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


async def measure(name: str, folder: Path, *, with_engine: bool = True) -> Row:
    """Returns the row of the family whose model is saved in `folder`; starts two engines, one after the other."""
    family, row = FAMILIES[name], Row(family=name)
    findings = [finding.text for finding in check_architecture(str(folder))]
    if findings:
        row.refused = findings[0].replace(f"{str(folder)!r} ", "")
        return row
    with attempted(row, "template"):
        row.template, row.stops, row.tools = await play(folder)
    whole = ModelConfig(path=str(folder), dtype="float32")
    lora: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": list(family.lora_targets)}
    adapted = whole.model_copy(update=lora)
    with attempted(row, "learner"):
        expected = plain_scores(folder)
        learners = [make_learner(model) for model in (whole, adapted)]
        row.learner = canary_gap(learners[0].score(SEQUENCES), expected).maximum
    if not with_engine or not isinstance(row.learner, float):
        return row
    with attempted(row, "sync"):
        async with engine_of(whole, family.engine_process) as generator:
            row.engine = canary_gap(await engine_scores(generator), expected).maximum
            row.sync = await synced(generator, learners[0])
    with attempted(row, "adapter"):
        async with engine_of(adapted, family.engine_process) as generator:
            row.adapter = await synced(generator, learners[1])
    return row


@contextlib.contextmanager
def attempted(row: Row, column: str) -> Iterator[None]:
    """Writes an error of the block into the row's column. What a library raises for a family that it does not know may
    be of any kind."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        setattr(row, column, f"fails: {text}")


# The model


def save_family(family: Family, folder: Path) -> None:
    """Saves model, tokenizer, chat template and stop tokens as a Hugging Face folder."""
    tokenizer = build_tokenizer(family)
    tokenizer.save_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in (family.eos, *family.stops)]
    config = network(family, vocab_size=len(tokenizer), eos_token_id=ids)
    if family.refused:  # only its config is read
        config.architectures = [family.config.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        return
    build_model(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


def network(family: Family, *, vocab_size: int, eos_token_id: list[int]) -> PreTrainedConfig:
    make: Callable[..., PreTrainedConfig] = getattr(transformers, family.config)
    return make(
        **SIZES | family.network,
        vocab_size=vocab_size,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=eos_token_id,
    )


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a random model in which norms and biases are no constants either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def build_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the family's role tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    is_text = "{" in family.template
    template = family.template if is_text else published_template(family.template)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, chat_template=template
    )


def published_template(name: str) -> str:
    """Returns a chat template as its model's authors published it. Raises ConfigError without the package trl."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise ConfigError("the published chat templates come with the package trl, a development dependency")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# Log-probs

_IDS = torch.Generator().manual_seed(0)
SEQUENCES: list[list[int]] = [torch.randint(0, 256, (length,), generator=_IDS).tolist() for length in (20, 33, 200)]
"""Token ids of bytes; the last sequence is longer than a sliding window and than several blocks of an engine's
cache."""


@torch.no_grad()
def plain_scores(folder: Path) -> list[list[float]]:
    """Returns the log-probs of SEQUENCES by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scores = []
    for ids in SEQUENCES:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return scores


async def engine_scores(generator: Generator) -> list[list[float]]:
    return list(await asyncio.gather(*(generator.score(ids) for ids in SEQUENCES)))


def make_learner(model: ModelConfig) -> Learner:
    return Learner(
        LearnerSettings(
            model=model,
            optimizer=OptimizerConfig(lr=1e-2),
            learner=LearnerConfig(),
            algorithm=AlgorithmConfig(kl_coef=0.0),
            temperature=1.0,
            num_updates=1,
            objective="sft",
        )
    )


@contextlib.asynccontextmanager
async def engine_of(model: ModelConfig, process: Literal["auto", "own"]) -> AsyncIterator[Generator]:
    settings = GenerationConfig(max_num_seqs=16, timeout_s=120.0, gpu_memory_utilization=0.3, engine_process=process)
    generator = Generator(model, settings, max_model_len=MAX_MODEL_LEN, seed=1)
    await generator.start()
    try:
        yield generator
    finally:
        await generator.shutdown()


async def synced(generator: Generator, learner: Learner) -> str:
    """Trains one step, sends the weights, and compares what the engine holds and computes with the learner's; raises
    AssertionError where they differ."""
    before = await engine_scores(generator)
    learner.step([[update()]])
    await generator.load_weights(pack_weights(learner.served_state_dict()), 1)
    held, sums = await generator.held_weights(), learner.checksums()
    check_held(held, sums, engine="the engine", version=1)
    expected = learner.score(SEQUENCES)
    gap = canary_gap(await engine_scores(generator), expected).maximum
    end = await generator.score_from_cache(SEQUENCES[-1])
    cached = canary_gap([end], [expected[-1][-len(end) :]]).maximum if end else None
    assert canary_gap(before, expected).maximum > 100 * TOLERANCE, "the step moved no log-prob"
    assert gap <= TOLERANCE, f"log-probs differ by {gap:.1e}"
    assert cached is None or cached <= TOLERANCE, f"log-probs from the prefix cache differ by {cached:.1e}"
    by_name = joined(sums, held.packed_modules).keys() <= held.checksums.keys()
    return f"{gap:.0e}, {'each tensor' if by_name else 'sum'}{'' if end else ', no prefix cache'}"


def update() -> MicroBatch:
    """Returns a batch that imitates SEQUENCES."""
    samples = [
        TrainingSample(
            trajectory_id=f"t{i}",
            group_id="g",
            context_index=0,
            token_ids=ids,
            loss_mask=[0] + [1] * (len(ids) - 1),
            logprobs=[0.0] * len(ids),
            policy_versions=[0] * len(ids),
            advantage=1.0,
            trajectory_tokens=len(ids) - 1,
        )
        for i, ids in enumerate(SEQUENCES)
    ]
    ((batch,),) = pack_step(samples, num_ranks=1, max_tokens=1000, aggregation="token")
    return batch


# Template, stop tokens and tools

PASSAGE = Passage(id="p1", title="Paris", text="Paris is the capital of France.")


async def play(folder: Path) -> tuple[str, str, str]:
    """Returns how the template treats a system text, the stop tokens with the closing one first, and what became of an
    attempt of MemSearcher with one search. Raises ConfigError for a template that cannot serve."""
    tokenizer = load_tokenizer(str(folder))
    config = parse_config(
        {
            "name": "families",
            "agent": {"name": "memsearcher"},
            "model": {"path": str(folder)},
            "budget": {
                "context_tokens": 32768,
                "question_tokens": 512,
                "memory_tokens": 1024,
                "action_tokens": 2048,
                "observation_tokens": 4096,
                "memory_message_tokens": 2048,
            },
        }
    )
    renderer = make_renderer(config, tokenizer=tokenizer)
    script = Script(tokenizer, closing=renderer.closing_id)
    searches: list[str] = []

    async def search(query: str, *, num_passages: int, partition: str) -> SearchResult:
        searches.append(query)
        return SearchResult(passages=[PASSAGE], snapshot="s")

    agent = config.agent_spec.agent(renderer, generate=script, search=search)
    question = Question(id="q", text="What is the capital of France?", golden_answers=["Paris"])
    trajectory = await agent.rollout(question, group_id="g", trajectory_id="t", member=0)
    first = tokenizer.decode(script.prompts[0])
    worked = (
        searches == ["capital of France"]
        and trajectory.end_reason is EndReason.ANSWERED
        and (trajectory.answer or "").strip() == "Paris"
        and '"wikipedia_search"' in first
        and PASSAGE.text in tokenizer.decode(script.prompts[1])
    )
    stops = [renderer.closing_id, *sorted(tokenizer.stop_token_ids - {renderer.closing_id})]
    return (
        "system text" if shows_system(tokenizer) else "no system text",
        ", ".join(f"`{tokenizer.decode([token])}`" for token in stops),
        "called" if worked else f"fails: {trajectory.end_reason}",
    )


def shows_system(tokenizer: HFTokenizer) -> bool:
    """Returns whether the template takes a system message and shows its text."""
    messages = [{"role": "system", "content": "RULES"}, {"role": "user", "content": "?"}]
    try:
        return "RULES" in tokenizer.render_chat(messages, add_generation_prompt=True)
    except ChatTemplateError:
        return False


class Script:
    """Samples one call, a memory and an answer, whatever it reads."""

    MESSAGES = (
        'I search.</think>\n<tool_call>{"name": "wikipedia_search", "arguments": {"query": "capital of France"}}'
        "</tool_call>",
        "<memory>Paris is the capital of France.</memory>",
        "I know it.</think>\n\\boxed{Paris}",
    )

    def __init__(self, tokenizer: HFTokenizer, *, closing: int) -> None:
        self._tokenizer, self._closing = tokenizer, closing
        self._messages = iter(self.MESSAGES)
        self.prompts: list[list[int]] = []

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        self.prompts.append(list(token_ids))
        sampled = [*self._tokenizer.encode_template(next(self._messages)), self._closing]
        return Completion(
            token_ids=sampled, logprobs=[-1.0] * len(sampled), finish_reason=FinishReason.STOP, policy_version=0
        )


if __name__ == "__main__":
    sys.exit(main())
