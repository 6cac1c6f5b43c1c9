"""Settings that all agents have. Each agent's own settings are in its file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, model_validator

from mempipe.settings import Section


class CompatConfig(Section):
    """Switches to what published code does where it departs from its paper, or its evaluation from its training."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"none": {}}
    """The flags that a preset sets, as that code behaves."""

    preset: str = "none"
    """Sets the flags below as that code behaves; a flag in the config overrides the preset."""
    question_mark: bool = False
    """Add "?" to a question that does not end in one."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: object) -> object:
        preset = values.get("preset", "none") if isinstance(values, dict) else "none"
        if not isinstance(preset, str) or preset not in cls.PRESETS:
            raise ValueError(f"agent.compat.preset is {preset!r}; this agent has {', '.join(map(repr, cls.PRESETS))}")
        return {**cls.PRESETS[preset], **values} if isinstance(values, dict) else values

    def active(self) -> list[str]:
        """Returns the flags that differ from their defaults, each with its value."""
        fields = {name: field.default for name, field in type(self).model_fields.items() if name != "preset"}
        return [f"{name}: {getattr(self, name)}" for name, default in fields.items() if getattr(self, name) != default]


class SearchCompat(CompatConfig):
    """Switches of an agent that searches."""

    num_passages: int | None = Field(None, ge=1)
    """Passages of a search that names no number, where published code returns another number than its tool schema
    says; null: retrieval.num_passages, as the schema says.
    """


class AgentConfig(Section):
    """Names the agent, and the text that it reads. Further settings are the agent's own."""

    name: str = "memsearcher"
    """memsearcher (arXiv 2511.02805), memagent (2507.02259), memtrain (2606.03197), mem1 (2506.15841), react (full
    history, 2503.09516), full_text (the whole text in one context), program (any program that asks a model,
    docs/programs.md), or the module of your own agent (docs/extending.md)."""
    prompts: str = ""
    """A built-in prompt set (`mempipe/agents/prompts/NAME.yaml`) or the path of a YAML file with the same keys; empty:
    the agent's own. With `base: NAME` a file needs only the texts that differ from that built-in set.
    """
    compat: SerializeAsAny[CompatConfig] = CompatConfig()
    """Behave as published code does where it departs from its paper."""

    def check(self) -> None:
        """Raises ConfigError for something that the settings name and that this machine lacks."""

    @property
    def side_contexts(self) -> int:
        """Returns the number of contexts of a trajectory that no turn waits for."""
        return 0
