"""User-defined code that a config names: it is imported by name, and its errors name its file."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mempipe.faults import InfrastructureFault
from mempipe.settings import ConfigError

PASSED = "passed_to_"
"""How the modules begin that hold what a notebook or a script passed to a run as Python objects
(`mempipe.api.objects`). They are pickles, so a run's folder, which may come from others, is not searched for them."""
_OURS = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class UserCodeError(RuntimeError):
    """Code that a config names raised an error. It ends the run: it is never a reward, an observation or a
    lost group.
    """


def import_user_module(name: str, *, setting: str) -> ModuleType:
    """Imports the module `name`, which is installed or in the folder where the command was started.

    Raises ConfigError that names `setting`, and the file and line where its import fails.
    """
    if (folder := os.getcwd()) not in sys.path:  # a console script does not look there by itself; Ray's workers do
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing and name.startswith(PASSED):
            raise ConfigError(
                f"{setting} is in {name!r}, which a notebook or script passed to a run; it is in `python` in the "
                "run's folder: set PYTHONPATH to that folder to have it imported"
            ) from error
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigError(
                f"{setting} is {name!r}, which cannot be imported; is it installed, or in the folder that you "
                "start from?"
            ) from error
        raise ConfigError(
            f"{setting} is {name!r}, which imports {missing!r}, which is not installed ({_place(error)})"
        ) from error
    except Exception as error:  # whatever a module does while it is imported
        raise ConfigError(f"{setting} is {name!r}, whose import fails: {_described(error)}") from error


def load_user_object(path: str, *, setting: str) -> Any:
    """Returns the object that MODULE:NAME names. Raises ConfigError that names `setting`."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{setting} is {path!r}; expected MODULE:NAME, e.g. my_package.rewards:brevity")
    try:
        return getattr(import_user_module(module, setting=setting), name)
    except AttributeError as error:
        raise ConfigError(f"{setting} is {path!r}, but {module} has no {name}") from error


@contextmanager
def user_code(what: str, *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns every error of user-defined code inside the block into a `UserCodeError` with file and line. Faults of the
    infrastructure pass, and so do the exceptions of `passing`; they are taken out of a group of errors
    (asyncio.TaskGroup).
    """
    try:
        yield
    except (InfrastructureFault, UserCodeError, *passing):
        raise
    except Exception as error:
        if (known := _first(error, (InfrastructureFault, UserCodeError, *passing))) is not None:
            raise known from error
        raise UserCodeError(f"{what}: {_described(error)}") from error


def _first(error: BaseException, kinds: tuple[type[Exception], ...]) -> Exception | None:
    """Returns the first error of these kinds in a group of errors, None if there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _first(each, kinds)) is not None), None)
    return error if isinstance(error, kinds) else None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({_place(error)})"


def _place(error: BaseException) -> str:
    """Returns file and line of the innermost frame that is neither ours nor the import system's, outside libraries if
    there is one: a library that the user's code calls raises for it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(_OURS) and "importlib" not in frame.filename]
    users = [frame for frame in own if not frame.filename.startswith(_LIBRARIES)]
    frame = (users or own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
