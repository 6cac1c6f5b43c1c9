"""Errors of an engine."""

from __future__ import annotations

from mempipe.faults import InfrastructureFault


class EngineFault(InfrastructureFault):
    """The engine could not do what it was asked; the request itself was fine."""


class EngineDead(EngineFault):
    """The engine has ended, or was never started. A new `Generator` is needed."""


class GenerationTimeout(EngineFault):
    """A completion did not finish within `generation.timeout_s`, waiting included."""


class WeightTransferFailed(EngineFault):
    """New weights did not arrive. The engine samples nothing until a later `load_weights` succeeds."""
