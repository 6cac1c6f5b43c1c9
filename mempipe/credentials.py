"""Texts without the users and passwords of the addresses in them: messages, reports and logs are read by others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A password may hold "@" and "/": if a colon precedes it, it ends at the last "@" of the word. Without a colon
# an "@" behind a "/" is part of a path.
_USER = re.compile(r'://(?:[^\s/@:"]*:[^\s"]*|[^\s/"]*)@')


def without_passwords(text: str) -> str:
    """Returns the text with *** in place of user and password of every address.

    Of an address with a port and an "@" in its path it hides the host too: the port could be a password.
    """
    return _USER.sub("://***@", text)


def without_credentials(value: Any) -> Any:
    """Returns nested plain values without the user and password of any URI."""
    if isinstance(value, Mapping):
        return {name: without_credentials(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value
