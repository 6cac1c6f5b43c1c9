"""Processes that fork from a server: what is slow to import was loaded there once, not by each of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing

PRELOADED = ["mempipe.engines.checkpoint", "mempipe.engines.learner", "mempipe.retrieval.build", "bm25s"]


def fork_server() -> ForkServerContext:
    """The context to start processes from; the first of them starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_two_ranks(scenario: Callable[..., None], *arguments: Any) -> None:
    """Runs `scenario(rank, *arguments)` in two processes. Raises what one of them raised."""
    fork_server()
    torch.multiprocessing.start_processes(scenario, args=arguments, nprocs=2, start_method="forkserver")
