"""Weights travel whole, and what the engine serves is what the learner trained."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tiny_qwen2 import CANARY, build_model, changed_model, make_generator, model_scores, prompts
from transformers import Qwen2ForCausalLM

from mempipe.engines.checksums import checksum
from mempipe.engines.config import SamplingConfig
from mempipe.engines.generator import EngineDead, Generator, WeightTransferFailed
from mempipe.engines.model import PolicyModel
from mempipe.engines.policy_weights import weight_checksums
from mempipe.engines.proof import CanaryFailed, CanaryGap, StaleWeights, added, canary_gap, check_canary, check_held
from mempipe.engines.weights import (
    MEMBER_LOST,
    GpuWeightSender,
    TrainerClient,
    WeightHandle,
    newest_weights,
    pack_weights,
    publish,
    read_weights,
    replica_init_info,
)

TOLERANCE = 1e-4
PARAMETER_KINDS = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "model.norm"]
PARAMETER_KINDS += ["q_proj.weight", "k_proj.bias", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_published_file_holds_the_tensors_and_newest_finds_it(tmp_path):
    tensors = {"a": torch.randn(3, 4), "steps": torch.tensor([7])}
    assert newest_weights(tmp_path) is None
    handle = publish(tensors, tmp_path, 5)
    assert handle.version == 5
    assert newest_weights(tmp_path) == handle
    assert json.loads(json.dumps(handle.update_info)) == handle.update_info
    found = read_weights(handle.update_info["path"], checksum=handle.update_info["checksum"])
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_packed_weights_are_published_as_they_are(tmp_path):
    tensors = {"a": torch.randn(3, 4)}
    assert (
        publish(pack_weights(tensors), tmp_path / "x", 1).update_info["checksum"]
        == publish(tensors, tmp_path / "y", 1).update_info["checksum"]
    )


def test_packing_casts_floats_only_and_writes_aliases_once(tmp_path):
    shared = torch.randn(4, 2)
    publish(
        pack_weights({"embed": shared, "ids": torch.arange(3), "head": shared, "t": shared.t()}, dtype=torch.bfloat16),
        tmp_path,
        0,
    )
    found = load_file(tmp_path / "weights-00000000.safetensors")
    assert found["embed"].dtype == torch.bfloat16
    assert found["ids"].dtype == torch.int64
    assert found.keys() == {"embed", "ids", "t"}
    assert torch.equal(found["t"], shared.t().to(torch.bfloat16))


def test_only_the_last_two_publications_stay_even_when_versions_go_back(tmp_path):
    for version in (1, 2, 3):
        publish({"a": torch.tensor([version])}, tmp_path, version)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "newest.json",
        "weights-00000002.safetensors",
        "weights-00000003.safetensors",
    ]
    publish({"a": torch.tensor([2])}, tmp_path, 2)
    assert newest_weights(tmp_path).version == 2
    assert sorted(p.name for p in tmp_path.glob("weights-*")) == [
        "weights-00000002.safetensors",
        "weights-00000003.safetensors",
    ]


def test_changed_bytes_are_refused(tmp_path):
    handle = publish({"a": torch.zeros(64)}, tmp_path, 1)
    path = Path(handle.update_info["path"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="sha256"):
        read_weights(str(path), checksum=handle.update_info["checksum"])


def test_the_canary_gap_has_mean_and_maximum_and_nan_is_infinite():
    assert canary_gap([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-3.25]]) == CanaryGap(mean=0.25, maximum=0.5)
    assert canary_gap([[float("nan")]], [[-1.0]]) == CanaryGap(mean=float("inf"), maximum=float("inf"))
    for engine, learner in (([[]], [[]]), ([[-1.0]], [[-1.0, -2.0]]), ([[-1.0]], [])):
        with pytest.raises(ValueError, match="canary tokens; the canary needs"):
            canary_gap(engine, learner)


def test_the_canary_judges_the_mean_and_a_single_token_loosely():
    """With logits in bfloat16 a token of a large model is off by 0.3 at times, and the mean by 0.04."""
    learner = [[-1.0] * 99, [-1.0]]
    assert check_canary([[-1.0] * 99, [-1.3]], learner, tolerance=0.05).maximum == pytest.approx(0.3)
    with pytest.raises(CanaryFailed, match=r"by 0\.06 .* on average, 0\.06 at most, on 100 .* allows 0\.05 and 1\b"):
        check_canary([[-1.06] * 99, [-1.06]], learner, tolerance=0.05)
    with pytest.raises(CanaryFailed, match=r"1\.5 at most"):
        check_canary([[-1.0] * 99, [-2.5]], learner, tolerance=0.05)
    with pytest.raises(CanaryFailed, match="inf"):
        check_canary([[float("nan")] * 99, [-1.0]], learner, tolerance=0.05)


def test_nccl_ranks_of_the_engines_follow_each_other():
    info = {"master_port": 1, "rank_offset": 1}
    assert [replica_init_info(info, replica=i, tensor_parallel=2)["rank_offset"] for i in range(3)] == [1, 3, 5]
    assert replica_init_info({"packed": False}, replica=1, tensor_parallel=2) == {"packed": False}
    assert info["rank_offset"] == 1


async def engine_scores(generator: Generator) -> list[list[float]]:
    return list(await asyncio.gather(*(generator.score(ids) for ids in CANARY)))


def trained_scores(model: Qwen2ForCausalLM) -> list[list[float]]:
    return [model_scores(model, ids) for ids in CANARY]


def test_before_any_update_the_engine_agrees_with_transformers(served):
    assert canary_gap(served.scores_at_start, trained_scores(build_model(seed=0))).maximum < TOLERANCE


@pytest.mark.parametrize("kind", [*PARAMETER_KINDS, ""])
async def test_promise_5_served_weights_are_the_trained_weights(generator, serve, kind):
    """After one kind of parameter changed (the embedding is the tied output head as well), and after all did."""
    before = build_model(seed=0)
    await serve(before)
    assert canary_gap(await engine_scores(generator), trained_scores(before)).maximum < TOLERANCE
    after = changed_model(before, kind)
    version = await serve(after)
    assert canary_gap(await engine_scores(generator), trained_scores(after)).maximum < TOLERANCE
    check_held(await generator.held_weights(), sums(after), engine="generator-0", version=version)
    assert canary_gap(trained_scores(before), trained_scores(after)).maximum > 0.01
    completion = await generator.generate(CANARY[0], max_tokens=4, sampling=SamplingConfig(), stop_token_ids=[])
    assert completion.policy_version == generator.policy_version == version
    assert completion.logprobs == pytest.approx(
        model_scores(after, CANARY[0] + completion.token_ids)[-4:], abs=TOLERANCE
    )


def sums(model: Qwen2ForCausalLM) -> dict[str, int]:
    """The checksums of a learner that holds the model."""
    return weight_checksums(PolicyModel(model), dtype=torch.float32)


async def test_promise_5_an_engine_names_what_it_holds_tensor_by_tensor(generator, serve):
    """Among them q, k and v, which the engine joins, and an embedding that it pads."""
    model = build_model(seed=0)
    version = await serve(model)
    held = await generator.held_weights()
    assert len(held.checksums) == 2 * (2 + 2 + 1 + 1 + 1) + 2  # two layers, embedding, last norm
    check_held(held, sums(model), engine="generator-0", version=version)


@pytest.mark.parametrize("kind", PARAMETER_KINDS)
async def test_promise_5_the_smallest_change_that_an_engine_missed_is_named(generator, serve, kind):
    """One value of one tensor, by one bit: no log-prob shows it."""
    model = build_model(seed=0)
    version = await serve(model)
    with torch.no_grad():
        name, parameter = next((n, p) for n, p in model.named_parameters() if kind in n)
        values = parameter.view(-1)
        values[5] = torch.nextafter(values[5], torch.tensor(9.0))
    assert canary_gap(await engine_scores(generator), trained_scores(model)).maximum < TOLERANCE
    layer = name.rsplit(".", 2)[0]
    with pytest.raises(StaleWeights, match=rf"generator-0 does not hold .* version {version}.* 1 of 16 .*{layer}"):
        check_held(await generator.held_weights(), sums(model), engine="generator-0", version=version)


async def test_promise_5_an_engine_that_ignores_updates_is_stale_and_fails_the_canary(generator, serve, monkeypatch):
    before = build_model(seed=0)
    await serve(before)
    after = changed_model(before)

    ask = generator._engine.collective_rpc

    async def ignore_updates(method: str, **arguments: Any) -> list[Any]:
        """Everything is acknowledged, the version included; only the weights stay."""
        return [None] if method == "update_weights" else await ask(method, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(generator._engine, "collective_rpc", ignore_updates)
        version = await serve(after)
    assert generator.policy_version == version
    with pytest.raises(StaleWeights, match=f"version {version}, which it says it serves: 16 of 16 checksums"):
        check_held(await generator.held_weights(), sums(after), engine="generator-0", version=version)
    with pytest.raises(CanaryFailed):
        check_canary(await engine_scores(generator), trained_scores(after), tolerance=0.05)


async def test_promise_5_the_version_is_compared_too(generator, serve):
    model = build_model(seed=0)
    version = await serve(model)
    with pytest.raises(StaleWeights, match=f"serves weights of version {version}, the learner sent {version + 1}"):
        check_held(await generator.held_weights(), sums(model), engine="generator-0", version=version + 1)


async def test_the_same_prompt_after_a_sync_is_not_answered_from_the_old_prefix_cache(generator, serve, monkeypatch):
    before = build_model(seed=0)
    after = changed_model(before)
    fresh, stale = prompts(2, length=100)  # three whole cache blocks each

    async def gap_after_sync(prompt: list[int]) -> float:
        """Serves `before`, fills the cache, serves `after`; how far the sampled log-probs are from `after`'s."""
        await serve(before)
        await generator.generate(prompt, max_tokens=4, sampling=SamplingConfig(), stop_token_ids=[])
        await serve(after)
        completion = await generator.generate(prompt, max_tokens=4, sampling=SamplingConfig(), stop_token_ids=[])
        return canary_gap([completion.logprobs], [model_scores(after, prompt + completion.token_ids)[-4:]]).maximum

    assert await gap_after_sync(fresh) < TOLERANCE

    async def keep_the_cache(*, running: bool) -> bool:
        return True

    with monkeypatch.context() as patch:
        patch.setattr(generator._engine, "reset_prefix_cache", keep_the_cache)
        assert await gap_after_sync(stale) > 0.01
    await serve(before)


async def test_promise_5_canaries_are_scored_from_the_prefix_cache_too(generator, serve, monkeypatch):
    before = build_model(seed=0)
    after = changed_model(before)
    fresh, stale = prompts(2, length=200, seed=5)

    async def ends_after_sync(canary: list[int]) -> list[float]:
        """Serves `before`, fills the cache, serves `after`, and scores the canary's end from the cache."""
        await serve(before)
        await generator.generate(canary, max_tokens=1, sampling=SamplingConfig(), stop_token_ids=[])
        await serve(after)
        return await generator.score_from_cache(canary)

    def gap(canary: list[int], found: list[float]) -> CanaryGap:
        return canary_gap([found], [model_scores(after, canary)[-len(found) :]])

    end = await ends_after_sync(fresh)
    assert len(end) == 200 - 4 * 32 - 1, "of 136 ids four blocks of 32 are in the cache"
    assert gap(fresh, end).maximum < TOLERANCE
    assert await generator.score_from_cache(fresh[:65]) == []
    assert len(await generator.score_from_cache(fresh)) == 200 - 6 * 32 - 1, "the first call has cached the whole"

    whole = generator._run

    async def only_what_was_computed(*arguments: Any) -> Any:
        """vLLM's runner on a GPU leaves the rows out that were found in the cache."""
        output = await whole(*arguments)
        output.prompt_logprobs = [None, *output.prompt_logprobs[(output.num_cached_tokens or 0) + 1 :]]
        return output

    again = await generator.score_from_cache(fresh)
    with monkeypatch.context() as patch:
        patch.setattr(generator, "_run", only_what_was_computed)
        assert await generator.score_from_cache(fresh) == again
        assert len(await generator.score(fresh)) == 199

    async def keep_the_cache(*, running: bool) -> bool:
        return True

    with monkeypatch.context() as patch:
        patch.setattr(generator._engine, "reset_prefix_cache", keep_the_cache)
        assert gap(stale, await ends_after_sync(stale)).maximum > 0.01
        assert gap(stale, await generator.score(stale)).maximum < TOLERANCE, "which the cold score does not show"
    await serve(before)


async def test_packed_weights_are_served_and_leave_no_file(generator):
    model = build_model(seed=3)
    files = set(Path("/dev/shm").glob("mempipe-*"))
    await generator.load_weights(pack_weights(model.state_dict()), generator.policy_version + 1)
    assert canary_gap(await engine_scores(generator), trained_scores(model)).maximum < TOLERANCE
    assert set(Path("/dev/shm").glob("mempipe-*")) == files


async def test_a_failed_transfer_stops_sampling_until_one_succeeds(generator, serve, tmp_path):
    model = build_model(seed=0)
    version = await serve(model)
    handle = publish(model.state_dict(), tmp_path / "damaged", version + 1)
    damaged = WeightHandle(version=version + 1, update_info={**handle.update_info, "checksum": "0" * 64})
    with pytest.raises(WeightTransferFailed, match=r"'update' failed.*sha256"):
        await generator.load_weights(damaged, version + 1)
    assert generator.policy_version == version
    with pytest.raises(WeightTransferFailed, match=f"version {version + 1}"):
        await generator.score(CANARY[0])
    await serve(model)
    assert canary_gap(await engine_scores(generator), trained_scores(model)).maximum < TOLERANCE


async def test_weights_that_lack_a_parameter_are_refused(generator, serve, tmp_path):
    weights = build_model(seed=0).state_dict()
    del weights["model.norm.weight"]
    version = generator.policy_version + 1
    with pytest.raises(WeightTransferFailed, match=r"lack model\.norm\.weight"):
        await generator.load_weights(publish(weights, tmp_path / "partial", version), version)
    await serve(build_model(seed=0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of products on CPUs")
async def test_a_processor_without_a_product_of_bfloat16_multiplies_by_copies_that_follow_a_sync(
    model_path, monkeypatch, tmp_path
):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    generator = make_generator(model_path, dtype="bfloat16", engine_process="own")  # which reads the variable anew
    await generator.start()
    try:
        model = build_model(seed=0)
        for version in (1, 2):
            stale = trained_scores(model)
            model = changed_model(model, seed=version)
            await generator.load_weights(publish(model.bfloat16().state_dict(), tmp_path, version), version)
            found = await engine_scores(generator)
            gap, stale_gap = canary_gap(found, trained_scores(model.float())), canary_gap(found, stale)
            assert gap.mean < 0.05 < stale_gap.mean
    finally:
        await generator.shutdown()


def test_a_tied_head_is_not_missing_while_vllm_reloads_layer_by_layer(monkeypatch, tmp_path):
    """As on a GPU, where the reload makes the head a parameter of its own until it is finished."""
    monkeypatch.setenv("MEMPIPE_FRONTEND_PID", str(os.getpid()))
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading

    from mempipe.engines.vllm_worker import SharedMemoryTransfer, UpdateInfo

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return {name for name, _ in weights}

    model = Tied()
    record_metadata_for_reloading(model)
    transfer = SharedMemoryTransfer(None, SimpleNamespace(parallel_config=None, model_config=None), "cuda", model)
    initialize_layerwise_reload(model)
    assert {name for name, _ in model.named_parameters()} == {"embed.weight", "head.weight"}
    info = publish({"embed.weight": torch.zeros(5, 4)}, tmp_path, 1).update_info
    transfer.receive_weights(UpdateInfo(**info))
    lacking = publish({"other": torch.zeros(5, 4)}, tmp_path, 2).update_info
    with pytest.raises(ValueError, match=r"lack embed\.weight \(1 parameters"):
        transfer.receive_weights(UpdateInfo(**lacking))


class CountingModel(torch.nn.Linear):
    """Counts how often its parameters are asked for: once for their shapes, once for their values."""

    num_passes = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self.num_passes += 1
        return super().named_parameters(*args, **kwargs)


class RecordingControl:
    """What a GPU sender asks of the engines."""

    def __init__(self) -> None:
        self.connected: list[dict[str, Any]] = []
        self.loaded: list[WeightHandle] = []

    def connect(self, init_info: dict[str, Any]) -> None:
        self.connected.append(init_info)

    def load(self, handle: WeightHandle) -> None:
        self.loaded.append(handle)


def test_ranks_other_than_0_gather_and_leave_the_engines_alone():
    control = RecordingControl()
    model = CountingModel(3, 2)
    sender = GpuWeightSender(model, dtype=torch.float32, control=control, backend="nccl", rank=1, num_engine_ranks=2)
    model.num_passes = 0
    sender.send(1)
    sender.send(2)
    sender.close()
    assert model.num_passes == 4
    assert control.connected == control.loaded == []


def test_weights_travel_in_the_engines_dtype_and_are_what_the_learner_says_it_sends():
    model = changed_model(build_model(seed=0))
    sender = GpuWeightSender(model, dtype=torch.bfloat16, control=RecordingControl(), backend="nccl", rank=1)
    source = sender._engine.source
    assert [meta.name for meta in source.metadata()] == [name for name, _ in source]
    assert {meta.dtype for meta in source.metadata()} == {tensor.dtype for _, tensor in source} == {torch.bfloat16}
    assert not any("lm_head" in name for name, _ in source)  # tied: it travels as the embedding
    found = added([{name: int(checksum(tensor))} for name, tensor in source])
    assert found == weight_checksums(PolicyModel(model), dtype=torch.bfloat16)


def test_the_optimiser_is_waited_for_before_weights_are_read(monkeypatch):
    calls: list[str] = []

    class Reading(torch.nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
            calls.append("read")
            return super().named_parameters(*args, **kwargs)

    sender = GpuWeightSender(Reading(3, 2), dtype=torch.float32, control=RecordingControl(), backend="nccl", rank=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(sender._engine, "_post_send_sync", lambda: None)
    sender.send(1)
    assert calls == ["wait", "read", "read"]


class Store:
    def __init__(self) -> None:
        self.keys: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self.keys.append(key)

    def check(self, keys: list[str]) -> bool:
        return {*keys} <= {*self.keys}


class Hanging:
    """A communicator as nccl's: a broadcast to a member that is gone ends only when it is aborted."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(store=Store())
        self.aborted = threading.Event()

    def broadcast(self) -> None:
        assert self.aborted.wait(60)

    def destroy(self) -> None:
        self.aborted.set()


def test_a_sender_whose_engine_dies_aborts_the_broadcast_and_finishes_the_gathering_of_all_ranks(monkeypatch):
    gathered: list[str] = []

    class Gathering(torch.nn.ParameterDict):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
            for name, parameter in super().named_parameters(*args, **kwargs):
                gathered.append(name)
                yield name, parameter

    class Dying(RecordingControl):
        def load(self, handle: WeightHandle) -> None:
            raise EngineDead(f"it died of version {handle.version}")

    model = Gathering({name: torch.zeros(2) for name in "abcd"})
    sender = GpuWeightSender(model, dtype=torch.float32, control=Dying(), backend="nccl", rank=1)
    engine: Any = sender._engine
    engine.model_update_group = group = Hanging()

    def send_weights() -> None:
        """Does what vLLM's does: a thread waits for the engines while this one broadcasts."""
        for _ in engine.source:
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(engine.client.update_weights, {})
                group.broadcast()
                raise RuntimeError("the broadcast was aborted") from answer.exception()

    monkeypatch.setattr(engine, "send_weights", send_weights)
    for version in (7, 8):
        gathered.clear()
        with pytest.raises(EngineDead, match=f"it died of version {version}"):
            sender.send(version)
        assert gathered == ["a", "b", "c", "d"] and group.group.store.keys == [MEMBER_LOST] * (version - 6)


def test_an_engine_stops_receiving_as_soon_as_the_group_has_lost_a_member(monkeypatch):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from mempipe.engines.vllm_group import GroupTransfer

    finished: list[str] = []
    transfer: Any = GroupTransfer.__new__(GroupTransfer)
    transfer.model_update_group = group = Hanging()
    monkeypatch.setattr(GroupTransfer, "finish_weight_update", lambda _: finished.append("finished"))
    monkeypatch.setattr(
        NCCLWeightTransferEngine, "receive_weights", lambda self, _: self.model_update_group.broadcast()
    )
    threading.Timer(0.5, group.group.store.set, (MEMBER_LOST, b"1")).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="lost a member"):
        transfer.receive_weights(None)
    assert time.monotonic() - started < 10 and finished == ["finished"]
    monkeypatch.setattr(NCCLWeightTransferEngine, "receive_weights", lambda *_: None)
    group.group.store.keys.clear()
    transfer.receive_weights(None)
    assert finished == ["finished"]
    transfer.shutdown()
    assert transfer.model_update_group is None


def test_an_unknown_gpu_backend_is_refused():
    with pytest.raises(ValueError, match="'gloo'"):
        GpuWeightSender(
            torch.nn.Linear(1, 1), dtype=torch.float32, control=RecordingControl(), backend=cast(Any, "gloo"), rank=1
        )


def test_a_broadcast_that_fails_before_the_death_is_known_raises_the_death(monkeypatch):
    """As with a communicator that notices a broken connection."""
    asked, told = threading.Event(), threading.Event()

    class Dying(RecordingControl):
        def load(self, handle: WeightHandle) -> None:
            asked.set()
            told.wait(10)
            raise EngineDead("Ray told it a moment later")

    sender = GpuWeightSender(torch.nn.Linear(1, 1), dtype=torch.float32, control=Dying(), backend="nccl", rank=1)
    engine: Any = sender._engine
    engine.model_update_group = group = Hanging()
    pool = ThreadPoolExecutor(1)

    def send_weights() -> None:
        pool.submit(engine.client.update_weights, {})
        assert asked.wait(10)
        raise ConnectionResetError("the connection is broken")

    monkeypatch.setattr(engine, "send_weights", send_weights)
    monkeypatch.setattr(engine.source, "finish", told.set)  # Ray tells it after the group was aborted
    with pytest.raises(EngineDead, match="a moment later"):
        sender.send(7)
    assert group.group.store.keys[0] == MEMBER_LOST
    pool.shutdown()


def test_rank_0_hands_vllms_updates_to_the_engines_under_the_version_that_is_sent(monkeypatch):
    """CUDA IPC handles hold types that are no plain data; they arrive as vLLM's worker unpickles them."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    control = RecordingControl()
    client = TrainerClient(control)
    client.begin(4)
    client.init_weight_transfer_engine({"packed": False})
    shape = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
    client.start_weight_update()
    client.update_weights(
        {**shape, "ipc_handles": [{"gpu": (torch.Tensor, 7)}], "ipc_handles_pickled": None, "tensor_sizes": None}
    )
    client.finish_weight_update()
    assert control.connected == [{"packed": False}]
    (handle,) = control.loaded
    assert handle.version == 4
    assert json.loads(json.dumps(handle.update_info)) == handle.update_info
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert IPCWeightTransferUpdateInfo(**handle.update_info).ipc_handles == [{"gpu": (torch.Tensor, 7)}]
