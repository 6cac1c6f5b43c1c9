"""A script that plays the agent in the synthetic world; a warm start imitates it."""

from __future__ import annotations

import re

from mempipe.data.scripted_agents import Fact, ScriptedMem1, known, last_between, parse_facts


class ScriptedCompaction(ScriptedMem1):
    """Writes a thought with the fact that it just read and a query or an answer; all facts as summary where the prompt
    asks for one, by opening a second memory.
    """

    def reply(self, prompt: str) -> str:
        facts, new = self._facts(prompt)
        if prompt.count("<memory>") > prompt.count("</memory>"):
            return known(self._noted([*facts, *new]))
        return self._message([*facts, *new], noted=new)

    def _facts(self, prompt: str) -> tuple[list[Fact], list[Fact]]:
        kept = parse_facts(last_between(prompt, "<memory>", "</memory>"))
        facts = [*kept, *parse_facts(" ".join(re.findall("<think>(.*?)</think>", prompt)))]
        searched = self._searched(facts, last_between(prompt, "<search>", "</search>"))
        return facts, self._read(facts, last_between(prompt, "<information>", "</information>")) if searched else []
