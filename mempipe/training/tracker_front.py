"""The recorder of a training run: a tracker with the settings, the words and the terminal of the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mempipe.config import RunConfig
from mempipe.engines.tokenizer import HFTokenizer, load_tokenizer
from mempipe.progress import say
from mempipe.tracking.traces import Wording
from mempipe.tracking.tracker import Tracker, last_run_id


class TrackerFront(Tracker):
    """The tracker of a run, in the run's own process. It needs no cluster, so it works in every phase and outlives
    every actor. It reports a record that it cannot write in the run's terminal at once.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(
            config.tracking,
            folder=config.folder.absolute(),
            run_name=config.name,
            run_config=config.model_dump(mode="json"),
            resume_run_id=last_run_id(config.folder),
            further=config.tracking.further_writers,
            wording=Wording(decode=_Decoder(config.model.path), thought=config.agent_spec.thought),
            tell=say,
        )


class _Decoder:
    """Decodes token ids with the tokenizer of a model, which is loaded at the first call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    @cached_property
    def _tokenizer(self) -> HFTokenizer:
        return load_tokenizer(self._path)
