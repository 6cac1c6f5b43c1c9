"""An agent, a reward and a tool of one's own: see docs/extending.md."""
