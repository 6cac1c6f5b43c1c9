"""Faults of the machinery, which are retried and never become data (promise 8)."""


class InfrastructureFault(RuntimeError):
    """An engine, a retriever or a node failed; the question and the policy had nothing to do with it."""
