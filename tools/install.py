"""`pip install` by uv, in a fraction of the time: `python tools/install.py ARGUMENTS`.

uv is told what pip's configuration says: a mirror, constraints, certificates. pip itself installs where it has options
that have no counterpart here, where uv is not to be had, and where uv fails.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}
"""Options of pip: the variable by which uv is told the same, and what separates several values there."""
OF_PIP_ALONE = {"cache-dir", "disable-pip-version-check", "no-cache-dir", "no-input", "progress-bar", "retries"}
"""Options of pip that do not decide what is installed."""
_LINE = re.compile(r"(global|install|:env:)\.([a-z-]+)=(.+)")


def uv_variables(listed: Iterable[str]) -> dict[str, str] | None:
    """Returns the variables for uv from the lines of `pip config list`; None if uv cannot be told one of the options.

    An environment variable comes before the section `install`, and this before `global`, as in pip.
    """
    options: dict[str, dict[str, str]] = {}
    for line in listed:
        if match := _LINE.fullmatch(line.strip()):
            section, name, value = match.groups()
            options.setdefault(name.removeprefix("default-"), {})[section] = str(ast.literal_eval(value))
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best version of all indexes, as pip takes it
    for name, by_section in options.items():
        value = next(by_section[section] for section in (":env:", "install", "global") if section in by_section)
        if name in VARIABLES:
            variable, separator = VARIABLES[name]
            variables[variable] = separator.join(value.split())
        elif name not in OF_PIP_ALONE:
            return None
    return variables


def main(arguments: list[str]) -> int:
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    variables = uv_variables(listed.splitlines())
    if variables is not None and not subprocess.call([*PIP, "install", "--quiet", "uv>=0.8"]):
        if not subprocess.call([*UV, *arguments], env=os.environ | variables):
            return 0
        print("uv could not install this; pip tries it now", file=sys.stderr)
    return subprocess.call([*PIP, "install", "--quiet", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
