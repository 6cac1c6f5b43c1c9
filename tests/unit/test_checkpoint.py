"""A checkpoint is whole or absent, damage is noticed,
and a resumed run is the undisturbed one bit by bit (promise 7)."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_setup import load_plain, make_learner, pack, run_two_ranks, samples, save_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from mempipe.engines import checkpoint as checkpoint_module
from mempipe.engines import sharded_checkpoint
from mempipe.engines.checkpoint import CheckpointError, Position, TrainingState, latest, read_state, step_of
from mempipe.engines.export import export_hf
from mempipe.engines.learner import Learner
from mempipe.engines.sharded_checkpoint import CheckpointWriter, load_state, load_tensors, save_checkpoint

POSITION = Position(step=2, trained=[["q1"], ["q2", "q3"]], dropped=["q4"])
SCHEDULE = {"schedule": "linear", "warmup_steps": 1, "num_updates": 5}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"))


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full((3, 4), value), "optimizer/a/step": torch.tensor(value)}


def state(step: int) -> TrainingState:
    return TrainingState(num_updates_done=step, ranks="1 cpu", position=Position(step=step))


def save(folder: Path, step: int = 1, *, value: float = 1.0, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, tensors=tensors(value), state=state(step), keep=keep)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """All that makes up a learner's next step, whole and copied. All ranks must call it together."""
    held = {**learner._tensors(), **learner._rng_states(), "lr": torch.tensor(learner.lr), "random": torch.rand(3)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in held.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    path = save(tmp_path, 7, value=3.0)
    assert path == latest(tmp_path) == tmp_path / "step-00000007"
    assert read_state(path) == state(7)
    loaded = tensors(0.0)
    load_tensors(path, loaded)
    assert not differing(loaded, tensors(3.0))


def rewritten(path: Path, values: dict[str, Any]) -> Path:
    """The checkpoint with another state.json, as if it had been written that way."""
    content = json.dumps(values).encode()
    (path / "state.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_a_checkpoint_from_before_positions_were_typed_is_read(tmp_path):
    position = {"step": 2, "trained": [["q1"], ["q2", "q3"]], "dropped": ["q4"]}
    path = rewritten(save(tmp_path), {"num_updates_done": 4, "ranks": "1 cpu", "position": position})
    assert read_state(path) == TrainingState(num_updates_done=4, ranks="1 cpu", position=POSITION)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"position": {"step": 2, "consumed": []}}, "position.consumed"),
        ({"epoch": 3}, "epoch"),
        ({"position": 7}, "position"),
    ],
)
def test_a_checkpoint_with_another_state_is_refused_by_name(tmp_path, change, named):
    position = {"step": 2, "trained": [], "dropped": []}
    path = rewritten(save(tmp_path), {"num_updates_done": 4, "ranks": "1 cpu", "position": position} | change)
    with pytest.raises(CheckpointError, match=rf"another version of mempipe: state.json holds .*{named}"):
        read_state(path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"files": []}', '{"files": {}}', '{"files": {"state.json": {}}}', '{"files": {"a": 3}}']
)
def test_a_manifest_that_is_not_what_was_written_is_a_sentence(tmp_path, content):
    path = save(tmp_path)
    (path / "manifest.json").write_text(content)
    advice = f"move it out of {path.parent}, and the checkpoint before it is taken"
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged: manifest\.json .*; {advice}"):
        read_state(path)


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null"])
def test_the_step_of_a_checkpoint_with_a_damaged_state_is_a_sentence(tmp_path, content):
    path = save(tmp_path)
    (path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged: state\.json holds"):
        step_of(path)


def test_the_newest_checkpoints_are_kept(tmp_path):
    assert latest(tmp_path) is None
    for step in (8, 9, 10, 100):
        save(tmp_path, step)
    assert files(tmp_path) == ["step-00000010", "step-00000100"]
    assert latest(tmp_path) == tmp_path / "step-00000100"


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 3, value=1.0)
    path = save(tmp_path, 3, value=2.0)
    loaded = tensors(0.0)
    load_tensors(path, loaded)
    assert not differing(loaded, tensors(2.0))
    assert files(tmp_path) == ["step-00000003"]


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_in_nobodys_way(tmp_path):
    partial = tmp_path / ".step-00000002.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    assert latest(tmp_path) is None
    read_state(save(tmp_path, 2))
    assert files(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "removed"])
def test_damage_to_any_file_is_noticed(tmp_path, name, damage):
    path = save(tmp_path)
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-3])
    elif damage == "changed":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"(checkpoint {path} is damaged|cannot read checkpoint {path}): .+"):
        read_state(path)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Inside, writing more than that to one file fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [10, 1500])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path, limit):
    save(tmp_path, 1)
    with (
        file_size_limit(limit),
        pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000002: \S") as caught,
    ):
        save(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == ["step-00000001"]
    read_state(tmp_path / "step-00000001")


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*runs/step-00000001: Not a directory"):
        save(tmp_path / "runs")


def test_a_full_disk_while_syncing_leaves_nothing(tmp_path, monkeypatch):
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path)
    assert files(tmp_path) == []


def test_a_checkpoint_is_of_the_moment_it_was_started_at(tmp_path):
    writer = CheckpointWriter()
    held = tensors(1.0)
    for value in (1.0, 2.0):
        for tensor in held.values():
            tensor.fill_(value)
        writer.start(tmp_path, int(value), tensors=held, state=state(int(value)), keep=2)
        for tensor in held.values():
            tensor.fill_(9.0)
    assert writer.finish() == tmp_path / "step-00000002"
    assert writer.finish() is None
    for value in (1.0, 2.0):
        path = tmp_path / f"step-0000000{value:.0f}"
        assert read_state(path) == state(int(value))
        loaded = tensors(0.0)
        load_tensors(path, loaded)
        assert not differing(loaded, tensors(value))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    may_write, started = threading.Event(), threading.Event()

    def slow_hash(file: Path) -> str:
        started.set()
        assert may_write.wait(60)
        return "0" * 64

    monkeypatch.setattr(sharded_checkpoint, "sha256", slow_hash)
    writer = CheckpointWriter()
    writer.start(tmp_path, 1, tensors=tensors(), state=state(1), keep=2)
    assert started.wait(60)  # the writer is in the middle of it, and `start` has returned
    assert latest(tmp_path) is None
    may_write.set()
    writer.finish()
    assert latest(tmp_path) == tmp_path / "step-00000001"


def test_a_background_write_that_failed_is_known_without_waiting(tmp_path, monkeypatch):
    may_write = threading.Event()

    def no_space(file: Path) -> str:
        assert may_write.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sharded_checkpoint, "sha256", no_space)
    writer = CheckpointWriter()
    writer.start(tmp_path, 1, tensors=tensors(), state=state(1), keep=2)
    assert not writer.failed  # it is being written
    may_write.set()
    until = time.monotonic() + 60
    while not writer.failed:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.finish()
    assert not writer.failed


@pytest.mark.parametrize("call", ["finish", "start"])
def test_a_background_write_that_fails_is_raised_by_the_next_call(tmp_path, call):
    (tmp_path / "runs").write_text("a file")
    writer = CheckpointWriter()
    settings = {"tensors": tensors(), "state": state(1), "keep": 1}
    writer.start(tmp_path / "runs", 1, **settings)
    with pytest.raises(CheckpointError, match="Not a directory"):
        writer.finish() if call == "finish" else writer.start(tmp_path, 2, **settings)
    writer.start(tmp_path / "other", 2, **settings)
    assert writer.finish() == tmp_path / "other" / "step-00000002"


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = save(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this model and optimiser"):
        load_tensors(path, {"model/a": torch.zeros(5, 4)})
    with pytest.raises(CheckpointError, match="does not fit this model and optimiser"):
        load_tensors(path, {"model/b": torch.zeros(3, 4)})
    with pytest.raises(CheckpointError, match="cannot read checkpoint"):
        read_state(tmp_path / "step-00000099")


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"objective": "sft"}])
def test_a_resumed_run_is_the_undisturbed_one_bit_by_bit(qwen2, tmp_path, settings):
    updates = [pack(samples(seed), max_tokens=40)[0] for seed in range(4)]
    undisturbed = make_learner(qwen2, **SCHEDULE, **settings)
    undisturbed.step(updates[:2])
    path = undisturbed.save(tmp_path, POSITION, keep=2)
    undisturbed.step(updates[2:])
    expected = everything(undisturbed)

    resumed = make_learner(qwen2, seed=99, **SCHEDULE, **settings)
    resumed.logprobs(updates[0][0])
    assert resumed.load(path) == POSITION
    assert resumed.num_updates_done == 2
    resumed.step(updates[2:])
    assert not differing(everything(resumed), expected)


def test_a_lora_checkpoint_holds_the_adapter_only(qwen2, tmp_path):
    small = make_learner(qwen2, lora_rank=2).save(tmp_path / "lora", Position(), keep=1)
    large = make_learner(qwen2).save(tmp_path / "full", Position(), keep=1)
    assert sum(f.stat().st_size for f in small.iterdir()) < 0.5 * sum(f.stat().st_size for f in large.iterdir())


def two_rank_scenarios(rank: int, port: int, folder: Path, out: Path) -> None:
    """Two ranks: an undisturbed run, a resumed one, and a write that fails on rank 0 only."""

    def learner(**changes: Any) -> Learner:
        return make_learner(folder, rank=rank, world_size=2, master_port=port, **SCHEDULE, **changes)

    updates = [pack(samples(seed), num_ranks=2, max_tokens=40)[rank] for seed in range(3)]
    found: dict[str, Any] = {}
    undisturbed = learner()
    undisturbed.step(updates[:2])
    undisturbed.save(out / "checkpoints", POSITION, keep=1)
    found["at_save"] = undisturbed.full_state_dict()
    undisturbed.step(updates[2:])
    found["undisturbed"] = everything(undisturbed)

    resumed = learner(seed=99)
    resumed.logprobs(updates[0][0])
    found["position"] = resumed.load(out / "checkpoints" / "step-00000002")
    found["loaded"] = resumed.full_state_dict()
    resumed.step(updates[2:])
    found["resumed"] = everything(resumed)

    names: list[str] = []
    hash_file = checkpoint_module.sha256
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint_module, sharded_checkpoint):
            patch.setattr(module, "sha256", lambda file: names.append(file.name) or hash_file(file))
        resumed.save(out / "hashed", Position(), keep=1)
        found["hashed"], names[:] = list(names), []
        load_state(out / "hashed" / "step-00000003")
        found["verified"], names[:] = list(names), []
        assert load_state(out / "hashed" / "step-00000003", verified=True).position == Position()
        assert not names, "they were hashed before"

    with file_size_limit(10 if rank == 0 else -1):
        try:
            resumed.save(out / "failing", Position(), keep=1)
        except CheckpointError as error:
            found["error"] = str(error)
    try:
        resumed.save(out / f"node{rank}", Position(), keep=1)
    except CheckpointError as error:
        found["error_of_nodes"] = str(error)
    torch.save(found, out / f"rank{rank}.pt")
    undisturbed.close()


@pytest.fixture(scope="module")
def two_ranks(qwen2, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two_ranks")
    run_two_ranks(two_rank_scenarios, qwen2, out)
    return out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_resumed_ranks_are_the_undisturbed_ones_bit_by_bit(two_ranks):
    _, ranks = two_ranks
    for found in ranks:
        assert found["position"] == POSITION
        assert not differing(found["resumed"], found["undisturbed"])
    assert not differing(ranks[0]["loaded"], ranks[0]["at_save"])


def test_files_are_hashed_by_the_rank_that_wrote_them_and_verified_by_all(two_ranks):
    _, ranks = two_ranks
    wrote = [sorted(found["hashed"]) for found in ranks]
    assert wrote == [[".metadata", "__0_0.distcp", "state.json"], ["__1_0.distcp"]]
    verified = [set(found["verified"]) for found in ranks]
    assert all(verified) and not verified[0] & verified[1]
    assert sorted(verified[0] | verified[1]) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"]


def test_one_rank_continues_from_a_checkpoint_of_two(qwen2, two_ranks):
    out, ranks = two_ranks
    learner = make_learner(qwen2, **SCHEDULE)
    assert learner.load(out / "checkpoints" / "step-00000002") == POSITION
    assert not differing(learner.full_state_dict(), ranks[0]["at_save"])
    (update,) = pack(samples(2), max_tokens=40)
    learner.step([update])
    for name, held in everything(learner).items():
        if name.startswith("model/"):
            torch.testing.assert_close(held, ranks[0]["undisturbed"][name], rtol=0, atol=1e-5)


def test_a_folder_that_is_another_one_on_the_node_of_each_rank_is_refused(two_ranks):
    out, ranks = two_ranks
    for found in ranks:
        assert "__1_0.distcp, which another rank wrote, is not there" in found["error_of_nodes"]
        assert "set `output` to a folder that all nodes share" in found["error_of_nodes"]
    assert files(out / "node0") == []


def test_a_write_that_fails_on_one_rank_fails_on_all(two_ranks):
    out, ranks = two_ranks
    assert all("cannot write checkpoint" in found["error"] for found in ranks)
    assert files(out / "failing") == []


@pytest.mark.parametrize(
    ("architecture", "settings"), [("qwen2", {}), ("qwen2_untied", {}), ("llama", {}), ("qwen2", {"lora_rank": 4})]
)
def test_an_exported_model_is_the_learners(tmp_path, architecture, settings):
    folder = save_model(tmp_path, architecture)
    (folder / "tokenizer_config.json").write_text("{}")
    (update,) = pack(samples(0))
    learner = make_learner(folder, lr=1e-2, **settings)
    learner.step([update, update])
    exported = export_hf(tmp_path / "export", learner.full_state_dict(), source=folder)
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"} <= set(
        files(exported)
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tied = load_plain(folder).config.tie_word_embeddings
    assert (loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()) == tied
    assert make_learner(exported).score([[1, 2, 3, 4]])[0] == pytest.approx(learner.score([[1, 2, 3, 4]])[0], abs=1e-5)
    assert make_learner(folder).score([[1, 2, 3, 4]])[0] != pytest.approx(learner.score([[1, 2, 3, 4]])[0], abs=1e-3)


def test_an_export_that_fails_leaves_the_older_one(qwen2, tmp_path):
    weights = make_learner(qwen2).full_state_dict()
    exported = export_hf(tmp_path / "export", weights, source=qwen2)
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    with file_size_limit(2000), pytest.raises(CheckpointError, match=r"cannot export a model to .*export"):
        export_hf(tmp_path / "export", weights, source=qwen2)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert files(tmp_path) == ["export"]
