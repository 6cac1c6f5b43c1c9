"""A trace of one optimiser update by torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mempipe.storage.files import whole_file

_logger = logging.getLogger(__name__)


@contextmanager
def profiled(file: Path | None) -> Iterator[None]:
    """Records the operators of the block, on the CPU and on the GPU, as a Chrome trace in `file`; None: does nothing.

    A profiler or a disk that fails is a warning, and the block is not disturbed.
    """
    if file is None:
        yield
        return
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
    try:
        profiler.start()
    except RuntimeError as error:  # another profiler is at work in this process
        _logger.warning("%s is not written: %s", file, error)
        yield
        return
    try:
        yield
    finally:
        profiler.stop()
    try:
        file.parent.mkdir(exist_ok=True)  # and not the run's folder, which may be a mount that is away
        with whole_file(file, make_folder=False) as partial:
            profiler.export_chrome_trace(str(partial))
    except (OSError, RuntimeError) as error:
        _logger.warning("%s is not written: %s", file, error)
