"""A run in Weights & Biases (W&B), by W&B's own settings; without them its files stay in the run's folder."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

from mempipe.storage.files import write_text
from mempipe.tracking.metrics_writer import MetricsWriter, RecordedRun, Status

STATE_FILE = "wandb_run.json"


class WandbWriter(MetricsWriter):
    """Writes one W&B run, which every start of the run continues.

    W&B removes nothing from a run: of a step that is made again it keeps the first values. The names and the number of
    the last step are kept in the run's folder before they are sent, so that nothing is sent twice.
    """

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        self._run: Any = None
        self._id = uuid.uuid4().hex[:12]
        self._last, self._last_names = -1, set[str]()
        self._restart = -1

    def open(self) -> bool:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which uses the network offline too
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        wandb.setup(quiet)  # before `init`, which would ask for a login in the run's terminal
        file = self.run.folder / STATE_FILE
        is_new = not file.exists()
        if not is_new:
            state = json.loads(file.read_text(encoding="utf-8"))
            self._id, self._last, self._last_names = state["id"], state["last_step"], set(state["last_names"])
        self._run = wandb.init(
            id=self._id,
            resume="allow",
            name=self.run.name,
            project=os.environ.get("WANDB_PROJECT") or self.run.experiment,
            dir=str(self.run.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",  # pyrefly: ignore  # W&B checks the user's value
            config=dict(self.run.settings),
            allow_val_change=True,
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._keep_state(self._last, self._last_names)
        return is_new

    def log_metrics(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        if self._restart < step <= self._last:  # it was sent before the run was interrupted
            sent = self._last_names if step == self._last else values.keys()
            values = {name: value for name, value in values.items() if name not in sent}
        if not values:
            return
        if step >= self._last:
            self._keep_state(step, values.keys() | (self._last_names if step == self._last else set()))
        self._run.log({**values, "step": step})

    def restart_at(self, step: int) -> None:
        self._restart = step

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)

    def _keep_state(self, last: int, names: set[str]) -> None:
        state = {"id": self._id, "last_step": last, "last_names": sorted(names)}
        write_text(self.run.folder / STATE_FILE, json.dumps(state) + "\n", make_folder=False)
        self._last, self._last_names = last, names
