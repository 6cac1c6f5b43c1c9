"""A script that plays the policy for the program in the synthetic world; a warm start imitates it."""

from __future__ import annotations

import re

from mempipe.data.scripted_agents import ScriptedAgent, known, last_between, parse_facts


class ScriptedProgram(ScriptedAgent):
    """Writes a query or an answer, and after passages the notes."""

    def reply(self, prompt: str) -> str:
        facts = parse_facts("".join(re.findall(r"^notes: (.*);", prompt, re.MULTILINE)) + ";")
        query = last_between(prompt, "<search>", "</search>")
        if query:
            passages = prompt.partition("</search>")[2]
            new = self._read(facts, passages) if self._searched(facts, query) else []
            return known(self._noted([*facts, *new]))
        wanted = self._next_query(facts)
        # The space keeps the name the same token as everywhere else.
        return f"need {wanted[0]}<search>{wanted[1]}</search>" if wanted else f"<answer> {self._answer(facts)}</answer>"
