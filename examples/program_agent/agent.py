"""The built-in agent `program`, with a script that plays the policy in the world of the quickstart. Where a pretrained
model is trained, no such file is needed: `agent.name` is then `program`.
"""

from __future__ import annotations

from dataclasses import replace

from mempipe.agents.program.agent import AGENT as PROGRAM

AGENT = replace(PROGRAM, script="program_agent.script:ScriptedProgram")
