"""Masked documents by the whole job on a local cluster, the same by one worker and by two; and a training on them."""

from pathlib import Path

import polars as pl
import pytest

from mempipe.data.world import World
from mempipe.engines.tiny import build_model, build_tokenizer
from mempipe.loader import parse_config, parse_section
from mempipe.masking.documents import MemtrainConfig
from mempipe.masking.entities import can_be_read
from mempipe.retrieval.build import build_index
from mempipe.tracking.tracker import read_metrics
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
    return build_memtrain.main(parse_section(settings, MemtrainConfig))


def test_the_number_of_workers_changes_nothing(settings, documents):
    other = build_memtrain.main(parse_section(settings | {"name": "by1", "num_workers": 1}, MemtrainConfig))
    one, two = (pl.read_parquet(folder / "documents.parquet") for folder in (other, documents))
    assert len(one) == 16 and one.equals(two)
    for row in one.iter_rows(named=True):
        assert not can_be_read(row["context"], row["golden_answers"][0], row["kind"])


def test_a_model_is_trained_on_documents_as_they_are(settings, documents):
    config = parse_config(
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
    run = train.main(config)
    (step,) = read_metrics(run.folder / "metrics.jsonl")
    assert step["turns"] > 2 and step["measure/recall"] >= 0 and step["sampled_tokens"] > 0
    assert (run.folder / "huggingface" / "model.safetensors").exists()
