"""What an import refuses, by name and before it writes anything. The import itself: tests/engines/test_smollm2.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mempipe.engines.gguf_file import find_gguf
from mempipe.engines.model_import import import_model
from mempipe.settings import ConfigError

gguf = pytest.importorskip("gguf")


def a_file(
    folder: Path,
    *,
    architecture: str = "llama",
    drop: str = "",
    tensor: str = "token_embd.weight",
    scaling: tuple[str, float] | None = None,
) -> Path:
    """A GGUF file with the facts that an import asks for, but for one, and one small tensor."""
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    facts: dict[str, Callable[[], None]] = {
        "tokens": lambda: writer.add_token_list(["a", "b"]),
        "template": lambda: writer.add_chat_template("{{ messages }}"),
        "eos": lambda: writer.add_eos_token_id(1),
    }
    for name, add in facts.items():
        if name != drop:
            add()
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
    writer.add_tensor(tensor, np.zeros((2, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "clip"}, r"architecture 'clip', which transformers cannot read; it reads .*llama"),
        ({"drop": "tokens"}, r"has no tokenizer \(tokenizer.ggml.tokens\)"),
        ({"drop": "template"}, r"has no chat template \(tokenizer.chat_template\)"),
        ({"drop": "eos"}, r"has no tokenizer.ggml.eos_token_id"),
        ({"tensor": "rope_freqs.weight"}, r"scales its rotary embedding by rope_freqs.weight"),
        ({"scaling": ("yarn", 4.0)}, r"\(llama.rope.scaling.type yarn, factor 4\), which the import would lose"),
    ],
)
def test_what_cannot_be_represented_is_refused(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        import_model(str(a_file(tmp_path, **settings)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(a_file(tmp_path).read_bytes()[:40])
    with pytest.raises(ConfigError, match="is truncated or no GGUF file"):
        import_model(str(tmp_path / "model.gguf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no-such-package", "is neither a GGUF file nor an installed package"),
        ("", "is neither a GGUF file nor an installed package"),
        ("pytest", "package pytest carries none; expected exactly one GGUF file"),
    ],
)
def test_a_source_without_a_model_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        find_gguf(source)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"does not end in \.gguf"):
        find_gguf(str(tmp_path / "model.bin"))
