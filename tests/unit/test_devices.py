"""Why torch finds no GPU: each reason is said by name."""

import pytest

from mempipe.engines.devices import driver_version, unusable

FILE = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.2.0"""
OPEN_FILE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"


@pytest.mark.parametrize(("text", "version"), [(FILE, "550.54.15"), (OPEN_FILE, "580.65.06"), ("", "")])
def test_the_driver_names_its_version(text, version):
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        ("13.0", "550.54.15", ["driver 550.54.15 is too old", "CUDA 13.0", "needs 580"]),
        ("12.8", "470.1", ["driver 470.1 is too old", "needs 525"]),
        ("13.0", "580.65.06", ["sees no GPU under driver 580.65.06", "CUDA_VISIBLE_DEVICES"]),
        ("13.0", "", ["needs an NVIDIA driver"]),
        (None, "580.65.06", ["built without CUDA", "extra `gpu`"]),
    ],
)
def test_the_reason_is_named(cuda, driver, words):
    text = unusable(torch_version="2.13.0", cuda=cuda, driver=driver)
    assert all(word in text for word in words), text
