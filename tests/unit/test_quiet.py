"""What Ray writes to a run's terminal."""

from __future__ import annotations

from ray._private import worker

from mempipe.actors.quiet import quiet_retries


def test_only_notes_that_a_worker_died_or_its_task_is_tried_again_are_left_out(capsys):
    quiet_retries()
    retry = "Task f failed. There are infinite retries remaining, so the task will be retried. Error: IOError"
    death = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot ..."
    for line in (retry, death, "The node with node id 1 has been marked dead"):
        worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert [line.split("[0m")[-1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "The node with node id 1 has been marked dead"
    ]
