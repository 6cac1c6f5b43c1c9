"""The database behind an MLflow store, where the store is one and not a server."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

_SQLITE = "sqlite:///"


def is_database(uri: str) -> bool:
    """Returns whether the URI names a database that this process reads and writes itself."""
    from mlflow.store.db.db_types import DATABASE_ENGINES

    return re.split(r"[+:]", uri, maxsplit=1)[0] in DATABASE_ENGINES


def sqlite_uri(file: Path) -> str:
    """Returns the URI of a sqlite store. In a URI `?` ends the path, and `%2F` would be a slash."""
    return _SQLITE + str(file).replace("%", "%25").replace("?", "%3F")


def database_file(uri: str) -> Path | None:
    """Returns the file of a sqlite store; None for any other store."""
    return Path(unquote(uri.removeprefix(_SQLITE).partition("?")[0])) if uri.startswith(_SQLITE) else None


def file_identity(uri: str) -> tuple[int, int] | None:
    """Returns what tells the file of a sqlite store from another one of its name; None where there is no file."""
    file = database_file(uri)
    try:
        status = file.stat() if file else None
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status else None


def forget_metrics(uri: str, run_id: str, *, after_step: int, before_ms: int) -> None:
    """Removes the values that the run has of steps after `after_step`, if they were made before `before_ms` (unix
    milliseconds). MLflow's own interface removes whole runs only.

    Raises what the database raises.
    """
    from sqlalchemy import and_, column, create_engine, delete, insert, select, table

    names = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
    history, latest = (table(name, *(column(n) for n in names)) for name in ("metrics", "latest_metrics"))
    engine = create_engine(uri)
    try:
        with engine.begin() as connection:
            for values in (history, latest):
                gone = and_(values.c.run_uuid == run_id, values.c.step > after_step, values.c.timestamp < before_ms)
                connection.execute(delete(values).where(gone))
            of_run = select(history).where(history.c.run_uuid == run_id)
            known = set(connection.scalars(select(latest.c.key).where(latest.c.run_uuid == run_id)))
            newest = {}
            for value in connection.execute(of_run.order_by(history.c.step, history.c.timestamp, history.c.value)):
                newest[value.key] = value._asdict()
            lost = [value for key, value in newest.items() if key not in known]
            if lost:
                connection.execute(insert(latest), lost)
    finally:
        engine.dispose()
