"""Texts without the users and passwords of the addresses in them: messages, reports and logs are read by others."""

from __future__ import annotations

import re

# A password may hold "@" and "/": where a colon stands before it, it ends at the last "@" of the word. Without a colon
# an "@" behind a "/" is part of a path.
_USER = re.compile(r'://(?:[^\s/@:"]*:[^\s"]*|[^\s/"]*)@')


def without_passwords(text: str) -> str:
    """Returns the text with *** for what stands before the host of every address.

    Of an address with a port and an "@" in its path it hides the host too: the port could be a password.
    """
    return _USER.sub("://***@", text)
