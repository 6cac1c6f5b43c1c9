"""An engine on the GPUs of several ranks takes their weights by ipc."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing as mp
from ipc_in_files import NUM_RANKS, send
from tiny_qwen2 import CANARY, build_model, changed_model, make_generator, model_scores

from mempipe.engines import generator as engines
from mempipe.engines.model import PolicyModel
from mempipe.engines.policy_weights import weight_checksums
from mempipe.engines.proof import canary_gap, check_held
from mempipe.engines.weights import WeightHandle


@pytest.mark.jobs
async def test_every_worker_takes_its_part_of_the_weights_on_its_own_gpu(model_path, tmp_path, monkeypatch):
    """Two FSDP ranks gather and export; each of the engine's two workers opens the copies of the rank on its GPU."""
    mp.spawn(send, (tmp_path, 7), nprocs=NUM_RANKS)
    update = json.loads((tmp_path / "update.json").read_text())
    trained = changed_model(build_model(seed=0), seed=7)

    arguments_of = engines.engine_arguments
    monkeypatch.setattr(
        engines,
        "engine_arguments",
        lambda *args, **kwargs: {**arguments_of(*args, **kwargs), "worker_extension_cls": "ipc_worker.Extension"},
    )
    generator = make_generator(model_path, tensor_parallel=NUM_RANKS, transfer="ipc")
    await generator.start()
    try:
        await generator.load_weights(WeightHandle(version=1, update_info=update), 1)
        held, scores = await generator.held_weights(), [await generator.score(ids) for ids in CANARY]
        opened = await generator._call("opened", lambda engine: engine.collective_rpc("opened"))
    finally:
        await generator.shutdown()
    checksums = weight_checksums(PolicyModel(trained), dtype=torch.float32)
    check_held(held, checksums, engine="generator-0", version=1)
    assert canary_gap(scores, [model_scores(trained, ids) for ids in CANARY]).maximum < 1e-4
    num_weights = len([*trained.named_parameters()])
    assert opened == [[f"{i}-of-GPU-{gpu}.pt" for i in range(num_weights)] for gpu in range(NUM_RANKS)]
