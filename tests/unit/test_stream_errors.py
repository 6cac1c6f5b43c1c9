"""What a stream raises when one of its tasks failed, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import ray.data
from ray.exceptions import ActorDiedError, RayTaskError

from mempipe.settings import ConfigError
from mempipe.streams.pools import stream_tables

TRACE = 'Traceback (most recent call last):\n  File "pools.py", line 1, in read\n'


class Failed:
    """A dataset whose task failed with this trace."""

    def __init__(self, trace: str) -> None:
        self._trace = trace

    def iter_batches(self, **_: Any) -> Any:
        raise RayTaskError("read", self._trace, ValueError("lost"))


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            "mempipe.settings.ConfigError: 2 bad rows (2 empty), more than max_bad_rows 1:\n"
            "  a.jsonl, line 3: no text\n  a.jsonl, line 7: no text",
            ConfigError,
            "2 bad rows (2 empty), more than max_bad_rows 1:\n  a.jsonl, line 3: no text\n  a.jsonl, line 7: no text",
        ),
        (
            "mempipe.settings.ConfigError: corpus a holds no passage\n\nThe above exception was the direct cause\n"
            f"{TRACE}ray.exceptions.UserCodeException: failed",
            ConfigError,
            "corpus a holds no passage",
        ),
        (
            "OSError: [Errno 28] No space left on device: '/disk/i/00000001.arrow'",
            OSError,
            "[Errno 28] No space left on device: '/disk/i/00000001.arrow'",
        ),
        (  # of a group of errors, which one of them was taken out of
            "  + Exception Group Traceback (most recent call last):\n  +-+---------------- 1 ----------------\n"
            "    | mempipe.settings.ConfigError: it fails:\n    |   in line 3\n    +---------------------\n"
            f"{TRACE}mempipe.settings.ConfigError: it fails:\n  in line 3\n",
            ConfigError,
            "it fails:\n  in line 3",
        ),
    ],
)
def test_the_whole_sentence_of_a_task_that_failed_is_raised(monkeypatch, raised, kind, said):
    monkeypatch.setattr(ray.data, "read_datasource", lambda *_, **__: Failed(TRACE + raised))
    with pytest.raises(kind) as error:
        list(stream_tables(lambda: [], [], rows="segments"))
    assert type(error.value) is kind and str(error.value) == said


def test_the_setting_that_no_actor_can_be_made_with_is_named(monkeypatch):
    trace = f"error raised in its creation task\n{TRACE}mempipe.settings.ConfigError: the server does not answer\n"

    class Unmade:
        def iter_batches(self, **_: Any) -> Any:
            raise ActorDiedError(RayTaskError("__init__", trace, ValueError("lost")))

    monkeypatch.setattr(ray.data, "read_datasource", lambda *_, **__: Unmade())
    with pytest.raises(ConfigError, match=r"^the server does not answer$"):
        list(stream_tables(lambda: [], [], rows="trajectories"))
