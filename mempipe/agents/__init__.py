"""The agents: what the policy reads and writes. `mempipe.agents.registry` is the table of them."""
