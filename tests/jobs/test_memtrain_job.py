"""Masked documents by the whole job on a local cluster, where two workers make what one process makes without Ray; and
a training on them.

`make test` lets the agent read them with a policy that writes the same message everywhere: MemTrain on a real engine
and learner is in tests/engines/test_agents.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from mempipe.checks.inputs import check_inputs
from mempipe.config import RunConfig
from mempipe.data.qa import read_questions
from mempipe.data.world import World
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer
from mempipe.loader import parse_config, parse_section
from mempipe.masking.documents import CommonEntities, DocumentsConfig
from mempipe.masking.entities import can_be_read
from mempipe.retrieval.build import build_index
from mempipe.rollout import make_rollout, run_group
from mempipe.streams.documents import DocumentMaker
from mempipe.tracking.tracker import read_metrics
from mempipe.types import Completion, FinishReason, SearchResult
from pipelines import build_memtrain, train


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("memtrain")
    build_index([passage for seed in range(4) for passage in World(seed).passages], folder / "index")
    build_tokenizer(folder / "model")
    build_model(folder / "model", seed=1)
    values = {"index": str(folder / "index"), "tokenizer": str(folder / "model"), "entities": "rules", "mask": "____"}
    values |= {"num_documents": 16, "num_held_out": 4, "num_related": 4, "num_random": 8, "documents_per_part": 4}
    values |= {"output": str(folder), "name": "by2", "num_workers": 2}
    return values | {"chunk_tokens": 64, "min_tokens": 100, "max_tokens": 1000, "max_passage_share": 0.5}


@pytest.fixture(scope="module")
def documents(settings) -> Path:
    return build_memtrain.main(parse_section(settings, DocumentsConfig))


def test_two_workers_make_what_one_process_makes_without_ray(settings, documents, monkeypatch):
    def stream_parts(
        parts: list[dict[str, Any]], config: DocumentsConfig, common: CommonEntities | None
    ) -> Iterator[int]:
        maker = DocumentMaker(config, common)
        for part in parts:
            yield from maker(pa.Table.from_pylist([part])).column("count").to_pylist()

    monkeypatch.setattr(build_memtrain, "stream_parts", stream_parts)
    monkeypatch.setattr(build_memtrain, "connected", lambda *_, **__: nullcontext("namespace"))
    other = build_memtrain.main(parse_section(settings | {"name": "alone"}, DocumentsConfig))
    one, two = (pl.read_parquet(folder / "documents.parquet") for folder in (other, documents))
    assert len(one) == 16 and one.equals(two)
    for row in one.iter_rows(named=True):
        assert not can_be_read(row["context"], row["golden_answers"][0], row["kind"])


@pytest.fixture(scope="module")
def config(settings, documents) -> RunConfig:
    """A training on the documents as they are."""
    return parse_config(
        {
            "name": "trained",
            "output": settings["output"],
            "num_steps": 1,
            "model": {"path": settings["tokenizer"], "dtype": "float32"},
            "agent": {"name": "memtrain", "prompts": "tiny_memtrain", "mask": "____", "num_recalls": 2},
            "data": {"train": str(documents / "documents.parquet")},
            "budget": {
                "question_tokens": 48,
                "chunk_tokens": 64,
                "memory_tokens": 32,
                "memory_message_tokens": 32,
                "action_tokens": 16,
                "context_tokens": 256,
            },
            "generation": {"max_num_seqs": 32, "enforce_eager": True},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "advantage": "dr_grpo", "aggregation": "context"},
            "learner": {"num_ranks": 1, "max_tokens_per_micro_batch": 1024},
        }
    )


async def test_an_agent_reads_documents_as_they_are_and_is_asked_what_its_memory_holds(config):
    check_inputs(config)
    tokenizer = load_tokenizer(config.model.path)
    message = [*tokenizer.encode_template("Lima"), min(tokenizer.stop_token_ids)]

    async def generate(token_ids: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Completion:
        logprobs = [-1.0] * len(message)
        return Completion(token_ids=message, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_version=0)

    rollout = make_rollout(config, tokenizer=tokenizer, generate=generate, search=no_search, training=True)
    of_run = {"group_size": 2, "reward": config.reward, "advantage": config.algorithm}
    for document in read_questions(config.data.train):
        group = await run_group(document, rollout, group_id=f"0/{document.id}", **of_run)
        for trajectory in group.trajectories:
            assert len(trajectory.contexts) > 2 and len(trajectory.recalls) == 2
            assert any(measure.name == "recall" for measure in trajectory.measures)
            assert all(len(c.token_ids) <= config.budget.context_tokens for c in trajectory.contexts)


async def no_search(query: str, *, num_passages: int, partition: str) -> SearchResult:
    raise AssertionError("a document is read, nothing is searched")


@pytest.mark.jobs
def test_a_model_is_trained_on_documents_as_they_are(config):
    run = train.main(config)
    (step,) = read_metrics(run.folder / "metrics.jsonl")
    assert step["turns"] > 2 and step["measure/recall"] >= 0 and step["sampled_tokens"] > 0
    assert (run.folder / "huggingface" / "model.safetensors").exists()
