"""A user-defined agent, reward and tool: see docs/extending.md."""
