"""The text and tokens that a model's chat template puts around the messages of a context, taken from renderings of it.

The template is rendered with marks in place of the messages. The text between the marks is trusted. It marks the end of
a message and the next role: by special tokens, or by plain text (`[/INST]`, `<|assistant|>`, `### Response:`). Plain
text could be written by anyone, so it is broken in untrusted text as special tokens are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mempipe.agents.protocol import ChatTemplateError, Tokenizer
from mempipe.settings import ConfigError

# Private-use characters that stand for whole messages while the chat template is rendered.
SYSTEM, USER, ACTION, OBSERVATION = "\ue000", "\ue001", "\ue002", "\ue003"
_MESSAGES = re.compile(f"[{SYSTEM}{USER}{ACTION}{OBSERVATION}]")

_BRACKETED = re.compile(
    r"<+[^<>\n]*[^\W\d_][^<>\n]*>+|\[+[^\[\]\n]*[^\W\d_][^\[\]\n]*\]+|\{+[^{}\n]*[^\W\d_][^{}\n]*\}+"
)
_LETTER = re.compile(r"[^\W\d_]")
_NO_SENTENCE = re.compile(r"[^\w\s.,:;!?'\"()’“”–—-]")
"""A character that words and their punctuation do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """The template text around the messages of a context: system, user, action, observation, memory."""

    before_user: str  # with the system text in it
    after_user: str
    after_action: str
    after_observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMarks:
    """The marks that separate roles in a prompt: special tokens, and plain text that does not occur in ordinary
    text."""

    token_ids: frozenset[int]
    texts: tuple[str, ...]


def chat_frame(tokenizer: Tokenizer, *, system: str) -> ChatFrame:
    """Raises ConfigError when the chat template refuses, repeats or skips messages."""
    in_system = bool(system) and shows_system(tokenizer)
    prompt = _render(tokenizer, ["user"], system=in_system)
    before_user, after_user = _split_at(USER, prompt)
    turns = _split_at(ACTION, _render(tokenizer, ["user", "assistant", "user"], system=in_system))[1]
    after_action, after_observation = _split_at(OBSERVATION, turns)
    if in_system:
        before_user = before_user.replace(SYSTEM, system)
    elif system:  # no system role: its text goes before the user's
        before_user = f"{before_user}{system}\n\n"
    return ChatFrame(
        before_user=before_user,
        after_user=after_user,
        after_action=after_action.lstrip(),
        after_observation=after_observation,
    )


def closing_id(tokenizer: Tokenizer, after_action: str) -> int:
    """Returns the token with which the template ends an assistant message. Raises ConfigError when no stop token
    does.
    """
    closing, stops = tokenizer.encode_template(after_action)[:1], tokenizer.stop_token_ids
    if not closing or closing[0] not in stops:
        texts = [tokenizer.decode([i]) for i in sorted(stops)]
        raise ConfigError(
            f"the chat template continues after an assistant message with {after_action[:32]!r}, which does not "
            f"start with a stop token {texts}; add its token to eos_token_id in generation_config.json"
        )
    return closing[0]


def role_marks(tokenizer: Tokenizer, *, tags: Sequence[str]) -> RoleMarks:
    """Returns the marks of the template that are not protocol tags.

    Plain text is a mark when it is in brackets with a letter between them, or when it opens a message with a character
    that no sentence has, as `### Response:` does. Words alone are not a mark, since ordinary text contains them and
    would be broken. Words behind a special token (`<|im_start|>user`) cannot be forged. Raises ConfigError for a
    template that has words alone between a user's message and the assistant's.
    """
    rendered = _render(tokenizer, ["user", "assistant", "user"], system=shows_system(tokenizer))
    before, *between = _MESSAGES.split(rendered)
    special = re.compile("|".join(sorted(map(re.escape, tokenizer.special_tokens), key=len, reverse=True)) or r"(?!)")
    no_marks = {form for tag in (*tags, "think") for form in (f"<{tag}>", f"</{tag}>")}
    texts = [mark for gap in between for mark in _text_marks(gap, special)]
    # The opening of the first message precedes it, possibly after a preamble of the template.
    opening = before.rstrip().rpartition("\n")[2]
    texts += [mark for mark in _text_marks(opening, special) if texts]
    texts = [mark for mark in dict.fromkeys(texts) if mark.lower() not in no_marks]
    for gap in (between[-3], between[-1]):
        if gap.strip() and not special.search(gap) and not any(mark in gap for mark in texts):
            raise ConfigError(
                f"the chat template has {gap!r} between a user's message and the assistant's: any question or passage "
                "may hold that too and speak in the assistant's place; choose a model whose chat template marks roles "
                "with special tokens"
            )
    of_tags = {i for form in no_marks for i in tokenizer.encode_template(form)}
    in_template = set(tokenizer.encode_template("".join([before, *between])))
    return RoleMarks(token_ids=frozenset(tokenizer.special_token_ids & in_template - of_tags), texts=tuple(texts))


def _text_marks(gap: str, special: re.Pattern[str]) -> Iterator[str]:
    """Yields the plain-text marks of the text between two messages."""
    parts = special.split(gap)
    for part in parts:
        yield from _BRACKETED.findall(part)
    for line in _BRACKETED.sub("\n", parts[-1]).splitlines():
        if _LETTER.search(line) and _NO_SENTENCE.search(line):
            yield line.strip()


def _render(tokenizer: Tokenizer, roles: Sequence[str], *, system: bool) -> str:
    """Returns the template's text for messages of these roles, and for the assistant's that follows them."""
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, (USER, ACTION, OBSERVATION), strict=False)]
    start = [{"role": "system", "content": SYSTEM}] if system else []
    try:
        return tokenizer.render_chat([*start, *messages], add_generation_prompt=True)
    except ChatTemplateError as error:
        raise ConfigError(f"the chat template refuses a conversation of user, assistant and user: {error}") from error


def shows_system(tokenizer: Tokenizer) -> bool:
    """Returns whether the template takes a system message and shows its text."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    try:
        return SYSTEM in tokenizer.render_chat(messages, add_generation_prompt=True)
    except ChatTemplateError:
        return False


def _split_at(mark: str, text: str) -> tuple[str, str]:
    if text.count(mark) != 1:
        raise ConfigError(
            f"the chat template repeats or skips a message: its text occurs {text.count(mark)} times in the rendering"
        )
    before, _, after = text.partition(mark)
    return before, after
