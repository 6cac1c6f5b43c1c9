"""What `make setup` installs with: uv, told what pip's configuration says."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.install import uv_variables
from tools.processes import ROOT

ALL_INDEXES = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


@pytest.mark.parametrize(
    ("listed", "variables"),
    [
        ([], {}),
        (["global.index-url='https://mirror/simple'"], {"UV_DEFAULT_INDEX": "https://mirror/simple"}),
        (["global.extra-index-url='\\nhttps://a\\nfile:///b'"], {"UV_INDEX": "https://a file:///b"}),
        ([":env:.find-links='/wheels /more'"], {"UV_FIND_LINKS": "/wheels,/more"}),
        (["global.timeout='15'", ":env:.default-timeout='180'"], {"UV_HTTP_TIMEOUT": "180"}),
        (["global.cert='/old.pem'", "install.cert='/new.pem'"], {"SSL_CERT_FILE": "/new.pem"}),
        (["global.cache-dir='/c'", "freeze.timeout='10'", ""], {}),
    ],
)
def test_uv_is_told_what_pip_is_told(listed, variables):
    assert uv_variables(listed) == ALL_INDEXES | variables


@pytest.mark.parametrize("line", ["global.pre='true'", ":env:.no-binary=':all:'", "install.user='true'"])
def test_pip_itself_installs_where_uv_cannot_be_told(line):
    assert uv_variables(["global.timeout='15'", line]) is None


@pytest.mark.parametrize("more", [{}, {"PIP_PREFER_BINARY": "1"}], ids=["uv", "pip"])
def test_it_installs(tmp_path, more):
    wheel(tmp_path / "wheels", "tidy_example")
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), **more}
    target = tmp_path / "target"
    command = [sys.executable, str(ROOT / "tools" / "install.py"), "--target", str(target), "tidy-example"]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert (target / "tidy_example.py").read_text() == "VALUE = 1\n"
    (installer,) = target.glob("tidy_example-*/INSTALLER")
    assert installer.read_text().strip() == ("pip" if more else "uv")


@pytest.mark.parametrize(("gpus", "found"), [("0 1 2 3", "gpu"), ("", "cpu")])
def test_a_machine_with_several_gpus_gets_the_packages_for_them(tmp_path, gpus, found):
    listing = f'for i in {gpus}; do echo "GPU $i: NVIDIA H100"; sleep 0.05; done; echo "that was all"'
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{listing}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    lines = (ROOT / "tools" / "setup.sh").read_text().splitlines()
    (asked,) = [line for line in lines if line.startswith("if command -v nvidia-smi")]
    script = f"set -euo pipefail\n{asked}\necho gpu\nelse\necho cpu\nfi"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


def wheel(folder: Path, name: str) -> None:
    """Writes a package of one module."""
    folder.mkdir()
    meta = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "VALUE = 1\n",
        f"{meta}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{meta}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{meta}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{meta}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
