"""The memories that a program states with its requests, as those that its contexts begin with and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mempipe.agents.turn import Memory, Turn


@dataclass(slots=True)
class StatedMemories:
    """The memories of one trajectory.

    A context begins with the memory that its first request states, and leaves the one that is stated next. A context
    that states none, of a helper for example, has the newest one before it. A later request of the same
    context states a new memory only by another text.
    """

    newest: Memory | None = None
    _unfinished: list[Turn] = field(default_factory=list)
    """Contexts in which the policy has written something since the newest memory."""

    def state(self, memory: Memory, turn: Turn, *, opens: bool) -> Callable[[], None]:
        """Takes the memory of a request in the context `turn`, which it opens or continues. Returns what takes it back,
        for a request that is given up.
        """
        before, left = self.newest, [(each, each.new_memory) for each in self._unfinished]
        if not opens and before is not None and memory.text == before.text:
            return lambda: None
        self.newest = memory
        for each in self._unfinished:
            each.new_memory = memory
        self._unfinished.clear()
        if opens:
            turn.memory = memory

        def take_back() -> None:
            if self.newest is memory:  # no other request has stated one meanwhile
                self.newest = before
                for each, earlier in left:
                    each.new_memory = earlier
                    self.wrote(each)

        return take_back

    def inherit(self, turn: Turn) -> None:
        """Takes a request that opens the context `turn` and states no memory. Its prompt holds none."""
        if self.newest is not None:
            turn.memory = Memory(text=self.newest.text)

    def wrote(self, turn: Turn) -> None:
        """Takes a message of the policy in the context `turn`."""
        if not any(each is turn for each in self._unfinished):
            self._unfinished.append(turn)

    def end(self, turns: Sequence[Turn], *, answered: bool) -> None:
        """Ends the trajectory: its contexts leave the newest memory as it is. The one that answers leaves none."""
        for turn in self._unfinished:
            if not (answered and turn is turns[-1]):
                turn.new_memory = self.newest
