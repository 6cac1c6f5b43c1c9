"""What Ray writes to a run's terminal."""

from __future__ import annotations

from ray._private import worker

from mempipe.actors.quiet import quiet_retries


def test_only_the_note_that_a_task_is_tried_again_is_left_out(capsys):
    quiet_retries()
    note = "Task f failed. There are infinite retries remaining, so the task will be retried. Error: IOError"
    for line in (note, "The node with node id 1 has been marked dead"):
        worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert [line.split("[0m")[-1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "The node with node id 1 has been marked dead"
    ]
