"""Counts what Serve's proxy refuses before a replica hears of it.

The replicas count their own answers (`mempipe.serve.replicas.prometheus`). What the proxy refuses is in no log either,
since an attack would fill it.
"""

from __future__ import annotations

from typing import Any, Literal

Cause = Literal[
    "connections",  # MAX_CONNECTIONS are open
    "connections_of_address",
    "slow_header",
    "long_header",  # 431
    "malformed",  # 400, what the parser refuses
    "slow_reader",  # the client does not read its answer
    "pipelined",  # too many requests wait for the answers of earlier ones
    "key",  # 401, 403
    "requests_of_address",  # 429, without a key
    "requests",  # 503, without a key
    "slow_answer",  # 503, without a key
    "slow_body",  # 408
    "large_body",  # 413
    "bodies_of_address",  # 429
    "bodies",  # 503
    "lost_replica",  # 503
    "late_replica",  # 503
    "full_replicas",  # 503
    "starting",  # 503
]
_metric: Any = None


def count(cause: Cause) -> None:
    """Counts one refusal, for Prometheus, at the metrics port of the Ray node: `ray_mempipe_refused_total`."""
    global _metric
    if _metric is None:
        from ray.util.metrics import Counter

        _metric = Counter("mempipe_refused", "Refusals of the proxy, by cause.", ("cause",))
    _metric.inc(1, {"cause": cause})
