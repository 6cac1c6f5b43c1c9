"""Sessions and documents in their file: whole, bounded, of one owner, and there after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from machine import may_mount, small_disk

from mempipe.answers.errors import ApiError
from mempipe.serve.state.holders import is_gone
from mempipe.serve.state.replies import StoredReply
from mempipe.serve.state.reserve import Reserve
from mempipe.serve.state.responses import StoredResponse
from mempipe.serve.state.store import Store
from mempipe.settings import ConfigError


def open_store(folder, **limits) -> Store:
    return Store(folder / "service.sqlite", **{"lifetime_s": 60.0, **limits})


@pytest.fixture
def later(monkeypatch) -> Callable[[float], None]:
    """Moves the store's time on by that many seconds; it stands still otherwise."""
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr("mempipe.serve.state.database.time", SimpleNamespace(time=lambda: clock.now))
    return lambda seconds: setattr(clock, "now", clock.now + seconds)


async def refused(call) -> int:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.status


async def test_a_session_keeps_its_memory_over_a_restart(tmp_path):
    session = await open_store(tmp_path).sessions.create("ann")
    assert (session.memory, session.num_questions) == ("", 0)
    store = open_store(tmp_path)
    assert (await store.sessions.claim(session.id, "ann", for_s=5)).memory == ""
    await store.sessions.release(session.id, "Paris is the capital")
    again = await open_store(tmp_path).sessions.get(session.id, "ann")
    assert (again.memory, again.num_questions) == ("Paris is the capital", 1)
    assert [each.id for each in await store.sessions.of_owner("ann", limit=9)] == [session.id]


async def test_sessions_are_listed_in_the_order_of_their_creation(tmp_path, later):
    store, ids = open_store(tmp_path), list[str]()
    for _ in range(3):  # two at the same time each
        ids += sorted([(await store.sessions.create("ann")).id, (await store.sessions.create("ann")).id])
        later(1)
    await store.sessions.create("bob")

    async def found(**asked) -> list[str]:
        return [each.id for each in await store.sessions.of_owner("ann", **asked)]

    assert await found(limit=9) == ids
    assert await found(limit=3, after=ids[0]) == ids[1:4]
    assert await found(limit=2, after=ids[3], newest_first=True) == [ids[2], ids[1]]
    await store.sessions.delete(ids[1], "ann")
    assert await refused(found(limit=2, after=ids[1])) == 400


async def test_a_session_is_changed_between_questions_only(tmp_path):
    store = open_store(tmp_path, max_owner_bytes=20)
    session = await store.sessions.create("ann", memory="a")
    await store.sessions.claim(session.id, "ann", for_s=60)
    assert await refused(store.sessions.change(session.id, "ann", metadata="{}")) == 409
    await store.sessions.release(session.id, "b")
    changed = await store.sessions.change(session.id, "ann", metadata="{}", noted=lambda memory: f"{memory}c")
    assert (changed.memory, changed.metadata, changed.num_questions) == ("bc", "{}", 1)
    assert await store.sessions.get(session.id, "ann") == changed
    assert await refused(store.sessions.change(session.id, "ann", noted=lambda memory: "x" * 19)) == 429
    assert await refused(store.sessions.change(session.id, "bob", metadata="")) == 404


async def test_one_question_at_a_time_and_a_lost_one_lets_go(tmp_path, later):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    await store.sessions.claim(session.id, "ann", for_s=0.2)
    assert await refused(store.sessions.claim(session.id, "ann", for_s=5)) == 409
    later(0.25)
    await store.sessions.claim(session.id, "ann", for_s=5)
    await store.sessions.release(session.id, None)
    unanswered = await store.sessions.claim(session.id, "ann", for_s=5)
    assert (unanswered.memory, unanswered.num_questions) == ("", 0)


async def test_only_one_of_many_gets_a_session(tmp_path):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    claims = await asyncio.gather(
        *(store.sessions.claim(session.id, "ann", for_s=5) for _ in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(claim, ApiError) for claim in claims) == 1


async def test_what_is_written_at_once_is_all_there(tmp_path):
    stores = [open_store(tmp_path), open_store(tmp_path)]  # as of two replicas
    session, document = await stores[0].sessions.create("ann"), await stores[0].documents.create("ann")

    def noting(line: str) -> Callable[[str], str]:
        def noted(memory: str) -> str:
            time.sleep(0.02)
            return f"{memory}{line}"

        return noted

    each = [*zip("abcdefgh", stores * 4, strict=True)]
    await asyncio.gather(*(store.sessions.change(session.id, "ann", noted=noting(name)) for name, store in each))
    assert sorted((await stores[0].sessions.get(session.id, "ann")).memory) == [*"abcdefgh"]
    for start in range(0, 20, 2):  # sent again while it is on its way
        sent = (store.documents.append(document.id, "ann", b"xy", start=start) for _, store in each)
        assert {stored.num_bytes for stored in await asyncio.gather(*sent)} == {start + 2}
    for key in "0123456789":
        begun = (store.replies.begin("ann", key, key) for _, store in each)
        refusals = [refusal for refusal in await asyncio.gather(*begun, return_exceptions=True) if refusal is not None]
        assert [getattr(refusal, "status", refusal) for refusal in refusals] == [409] * 7


async def test_a_question_begins_with_the_memory_that_the_one_before_it_left(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    await store.sessions.claim(session.id, "ann", for_s=60)
    ending = threading.Thread(target=store.sessions.release_now, args=(session.id, "known"))

    def end_the_question_before(*_) -> None:
        if ending.ident is None:
            ending.start()
            ending.join(0.2)

    monkeypatch.setattr(store.database, "check_owner", end_the_question_before)
    assert await refused(store.sessions.claim(session.id, "ann", for_s=60)) == 409
    await asyncio.to_thread(ending.join)
    assert (await store.sessions.claim(session.id, "ann", for_s=60)).memory == "known"


async def test_who_reads_waits_for_nobody_and_who_writes_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.serve.state.database._BUSY_S", 0.1)
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    with store.database.open():  # as of another process
        assert await store.sessions.get(session.id, "ann") == session
        assert await refused(store.sessions.create("ann")) == 503
    with store.database._turn:
        assert await refused(store.sessions.create("ann")) == 503
    await store.sessions.create("ann")


async def test_what_ends_while_others_write_is_written_by_the_next_who_can(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.serve.state.database._BUSY_S", 0.1)
    store = open_store(tmp_path, max_owner_bytes=1000)
    session = await store.sessions.create("ann")
    await store.sessions.claim(session.id, "ann", for_s=60)
    for key in ("kept", "forgotten", "large"):
        assert await store.replies.begin("ann", key, key) is None
    with store.database.open():  # as of an operator's VACUUM
        await store.sessions.release(session.id, "known")
        for key, length in (("kept", 10), ("large", 2000)):
            await store.replies.end("ann", key, StoredReply(status=200, headers=[], body=b"x" * length))
        await store.replies.end("ann", "forgotten", None)
    assert (await store.sessions.claim(session.id, "ann", for_s=60)).memory == "known"
    assert (await store.replies.begin("ann", "kept", "kept")) is not None
    for key in ("forgotten", "large"):
        assert await store.replies.begin("ann", key, key) is None
    assert await refused(store.replies.begin("ann", "large", "large")) == 409


async def test_those_who_wait_to_write_leave_the_threads_of_the_process_to_others(tmp_path):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    with store.database._turn:
        waiting = [asyncio.create_task(store.sessions.create("ann")) for _ in range(40)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            assert await store.sessions.get(session.id, "ann") == session
            await asyncio.to_thread(str)
    await asyncio.gather(*waiting)


async def test_what_is_anothers_is_not_there(tmp_path):
    store = open_store(tmp_path)
    session, document = await store.sessions.create("ann"), await store.documents.create("ann")
    for call in (
        store.sessions.get(session.id, "bob"),
        store.sessions.claim(session.id, "bob", for_s=1),
        store.sessions.delete(session.id, "bob"),
        store.documents.append(document.id, "bob", b"x", start=None),
        store.documents.text(document.id, "bob"),
        store.documents.delete(document.id, "bob"),
        store.sessions.get("session-none", "ann"),
    ):
        assert await refused(call) == 404
    assert await store.sessions.of_owner("bob", limit=9) == []
    await store.sessions.delete(session.id, "ann")
    assert await refused(store.sessions.get(session.id, "ann")) == 404


async def test_what_has_expired_is_gone_and_makes_room(tmp_path, later):
    store = open_store(tmp_path, lifetime_s=0.1, max_items=2)
    session = await store.sessions.create("ann")
    await store.sessions.create("ann")
    assert await refused(store.sessions.create("ann")) == 429
    await store.sessions.create("bob")
    later(0.15)
    assert await refused(store.sessions.get(session.id, "ann")) == 404
    assert await store.sessions.of_owner("ann", limit=9) == []
    await store.sessions.create("ann")


async def test_what_is_used_does_not_expire(tmp_path, later):
    store = open_store(tmp_path)
    session, document = await store.sessions.create("ann"), await store.documents.create("ann")
    await store.documents.append(document.id, "ann", b"text", start=None)
    for _ in range(3):
        later(50)
        claimed = await store.sessions.claim(session.id, "ann", for_s=90)
        assert await store.documents.text(document.id, "ann") == "text"
        later(50)
        assert await refused(store.documents.text(document.id, "bob")) == 404  # to others it is not there, nor used
        assert await store.documents.text(document.id, "ann") == "text"
        later(39)
        await store.sessions.create("bob")  # which deletes what has expired
        assert (await store.sessions.get(session.id, "ann")).memory == claimed.memory
        await store.sessions.release(session.id, "m")
        assert await store.documents.text(document.id, "ann") == "text"
    later(60)
    assert await refused(store.documents.text(document.id, "ann")) == 404


@pytest.mark.parametrize("limit", ["max_owner_bytes", "max_bytes"])
async def test_what_has_expired_counts_no_more(tmp_path, later, limit):
    store = open_store(tmp_path, **{limit: 400})
    session, document = await store.sessions.create("ann"), await store.documents.create("ann")
    later(30)
    await store.sessions.claim(session.id, "ann", for_s=1)
    await store.sessions.release(session.id, "x")  # it lives longer than the document
    await store.documents.append(document.id, "ann", b"x" * 300, start=None)
    await answered(store, "k", b"x" * 20)
    later(59)
    await store.sessions.claim(session.id, "ann", for_s=1)
    await store.sessions.release(session.id, "x")
    assert not await store.responses.keep(StoredResponse(id="1", body="x" * 300, memory=""), "ann")
    later(1)
    for change in ("a" * 300, "b" * 300):
        memory = (await store.sessions.change(session.id, "ann", noted=lambda _, change=change: change)).memory
        assert memory == change
    assert await store.responses.keep(StoredResponse(id="1", body="x" * 50, memory=""), "ann")
    with store.database.open() as database:
        assert database.execute("SELECT COUNT(*) FROM pieces").fetchone()[0] == 0


async def test_a_document_is_the_sum_of_its_pieces_wherever_they_were_cut(tmp_path):
    text = "Ein Märchen 🦙 \r\n" * 50
    store, content = open_store(tmp_path), text.encode()
    document = await store.documents.create("ann")
    for start in range(0, len(content), 7):
        document = await store.documents.append(document.id, "ann", content[start : start + 7], start=start)
    assert document.num_bytes == len(content)
    assert await store.documents.append(document.id, "ann", content[7:14], start=7) == document  # sent again
    assert await refused(store.documents.append(document.id, "ann", b"other", start=7)) == 409
    assert await refused(store.documents.append(document.id, "ann", b"x", start=len(content) + 1)) == 409
    assert await store.documents.text(document.id, "ann") == text
    await store.documents.delete(document.id, "ann")
    with store.database.open() as database:
        assert database.execute("SELECT COUNT(*) FROM pieces").fetchone()[0] == 0


async def test_the_mark_that_begins_a_file_of_utf_8_is_no_text(tmp_path):
    store = open_store(tmp_path)
    document = await store.documents.create("ann")
    for piece in b"\xef\xbb", b"\xbfa \xef\xbb\xbfb":
        await store.documents.append(document.id, "ann", piece, start=None)
    assert await store.documents.text(document.id, "ann") == "a \ufeffb"


async def test_a_long_document_is_in_memory_once(tmp_path):
    store, piece = open_store(tmp_path), b"a word " * 10_000
    document = await store.documents.create("ann")
    for _ in range(100):
        document = await store.documents.append(document.id, "ann", piece, start=None)
    tracemalloc.start()
    try:
        text = await store.documents.text(document.id, "ann")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(text) == document.num_bytes
    assert peak < 1.5 * len(text)


@pytest.mark.parametrize(
    ("pieces", "byte"),
    [([b"Z\xc3", b"\xbcrich \xff"], 8), ([b"Z\xc3", b"rich"], 1), ([b"Zurich", b"\xc3"], 6)],
)
async def test_the_byte_that_is_not_utf_8_is_named_wherever_the_document_was_cut(tmp_path, pieces, byte):
    store = open_store(tmp_path)
    document = await store.documents.create("ann")
    for piece in pieces:
        await store.documents.append(document.id, "ann", piece, start=None)
    with pytest.raises(ApiError, match=f"not UTF-8: byte {byte}$"):
        await store.documents.text(document.id, "ann")


async def test_a_document_too_long_or_of_no_text_is_refused(tmp_path):
    store = open_store(tmp_path, max_document_bytes=4)
    document = await store.documents.create("ann")
    assert await refused(store.documents.append(document.id, "ann", b"12345", start=None)) == 413
    await store.documents.append(document.id, "ann", b"ab\xc3", start=None)  # the half of a letter
    assert await refused(store.documents.text(document.id, "ann")) == 400
    await store.documents.append(document.id, "ann", b"x", start=None)
    assert await refused(store.documents.text(document.id, "ann")) == 400


def test_a_folder_that_cannot_hold_it_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state is"):
        open_store(tmp_path / "file" / "below")


async def test_a_session_is_free_as_soon_as_the_process_that_held_it_is_gone(tmp_path):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    await store.sessions.claim(session.id, "ann", for_s=300)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with store.database.open() as database:
        holder = f"{ended.pid}:1.0"
        database.execute("UPDATE sessions SET holder=?", (holder,))
    assert (await store.sessions.claim(session.id, "ann", for_s=300)).id == session.id
    assert await refused(store.sessions.claim(session.id, "ann", for_s=300)) == 409
    with store.database.open() as database:  # another process has the number now
        database.execute("UPDATE sessions SET holder=?", (f"{os.getpid()}:1.0",))
    assert (await store.sessions.claim(session.id, "ann", for_s=300)).id == session.id


async def test_a_clock_that_is_set_lets_nobody_take_what_a_living_process_holds(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    session = await store.sessions.create("ann")
    await store.sessions.claim(session.id, "ann", for_s=60)
    assert await store.replies.begin("ann", "key", "digest") is None
    began = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: began + 3600)
    assert await refused(store.sessions.claim(session.id, "ann", for_s=60)) == 409
    assert await refused(store.replies.begin("ann", "key", "digest")) == 409


def test_a_clock_that_is_set_ends_no_other_process(monkeypatch):
    says = "from mempipe.serve.state.holders import this_process; print(this_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", says], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        holder, booted = other.stdout.readline().strip(), psutil.boot_time()
        assert not is_gone(holder)
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600)
        assert not is_gone(holder)
        other.stdin.close()
    assert is_gone(holder)


async def test_a_database_of_an_earlier_version_is_opened(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "service.sqlite")) as database:
        database.executescript(
            "CREATE TABLE sessions (id TEXT PRIMARY KEY, owner TEXT NOT NULL, memory TEXT NOT NULL, "
            "num_questions INTEGER NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL, "
            "busy_until REAL NOT NULL DEFAULT 0);"
            "INSERT INTO sessions VALUES ('session-1', 'ann', 'Zürich', 1, 0, 1e12, 0)"
        )
    store = open_store(tmp_path, max_owner_bytes=10)
    assert (await store.sessions.claim("session-1", "ann", for_s=5)).memory == "Zürich"
    assert await refused(store.sessions.create("ann", memory="1234")) == 429  # its seven bytes count
    await store.sessions.create("ann", memory="123")


@pytest.mark.parametrize("table", ["sessions", "documents", "responses", "replies"])
def test_no_statement_reads_every_row_of_a_table(tmp_path, table):
    open_store(tmp_path)
    with sqlite3.connect(tmp_path / "service.sqlite") as database:
        ending = f"DELETE FROM {table} WHERE expires_at<=1"
        counted = f"SELECT SUM(num_bytes) FROM {table}"
        plans = [database.execute(f"EXPLAIN QUERY PLAN {query}").fetchall() for query in (ending, counted)]
    assert all("INDEX" in step[3] for plan in plans for step in plan), plans


async def test_memories_count_as_documents_do(tmp_path):
    store = open_store(tmp_path, max_owner_bytes=100, max_bytes=150)
    mine, document = await store.sessions.create("ann", memory="x" * 60), await store.documents.create("ann")
    assert await refused(store.sessions.create("ann", memory="ü" * 21)) == 429
    assert await refused(store.documents.append(document.id, "ann", b"x" * 41, start=None)) == 429
    assert await refused(store.sessions.create("bob", memory="x" * 91)) == 503
    await store.sessions.claim(mine.id, "ann", for_s=5)
    await store.sessions.release(mine.id, "ü" * 45)
    assert await refused(store.documents.append(document.id, "ann", b"x" * 11, start=None)) == 429
    await store.sessions.claim(mine.id, "ann", for_s=5)
    await store.sessions.release(mine.id, "x" * 101)  # the question was answered, so its memory is kept
    assert (await store.sessions.get(mine.id, "ann")).memory == "x" * 101
    for call in (
        store.sessions.claim(mine.id, "ann", for_s=5),
        store.sessions.create("ann"),
        store.documents.create("ann"),
    ):
        assert await refused(call) == 429
    await store.sessions.delete(mine.id, "ann")
    await store.documents.append(document.id, "ann", b"x" * 100, start=None)


async def answered(store: Store, key: str, body: bytes = b"", owner: str = "ann") -> None:
    assert await store.replies.begin(owner, key, key[0]) is None
    await store.replies.end(owner, key, StoredReply(status=200, headers=[["a", "b"]], body=body))


async def test_of_the_replies_of_an_owner_the_newest_are_kept(tmp_path, later):
    store = open_store(tmp_path, max_replies=3)
    for number in range(5):
        later(1)
        await answered(store, str(number))
    assert await store.replies.begin("ann", "5", "5") is None  # replies 3 and 4 are left
    assert (await store.replies.begin("ann", "4", "4")) is not None
    assert await store.replies.begin("ann", "2", "2") is None
    assert await store.replies.begin("ann", "3", "3") is None
    assert await refused(store.replies.begin("ann", "6", "6")) == 429  # 5, 2 and 3 are in progress
    await answered(store, "6", owner="bob")
    await store.replies.end("ann", "5", None)
    await answered(store, "6")


async def test_the_same_key_of_two_owners_has_the_reply_of_each(tmp_path):
    store = open_store(tmp_path)
    for owner in ("ann", "bob"):
        await answered(store, "key", owner.encode(), owner=owner)
    assert await store.replies.begin("eve", "key", "k") is None
    await store.replies.end("eve", "key", None)
    for owner in ("ann", "bob"):
        reply = await store.replies.begin(owner, "key", "k")
        assert reply is not None and reply.body == owner.encode()


async def test_a_reply_counts_with_its_key_and_headers_and_older_ones_make_room(tmp_path, later, monkeypatch):
    store = open_store(tmp_path, max_owner_bytes=1000)
    document = await store.documents.create("ann")
    await store.documents.append(document.id, "ann", b"x" * 500, start=None)
    await answered(store, "a" * 200)
    assert await refused(store.documents.append(document.id, "ann", b"x" * 300, start=None)) == 429
    later(1)
    await answered(store, "b" * 200, b"x" * 200)
    assert (await store.replies.begin("ann", "b" * 200, "b")) is not None
    later(1)
    await answered(store, "c", b"x" * 600)  # too long beside the document: it is not kept, and the others are
    assert (await store.replies.begin("ann", "b" * 200, "b")) is not None
    later(1)
    await answered(store, "d" * 100, b"x" * 200)
    assert await store.replies.begin("ann", "b" * 200, "b" * 10) is None
    assert await refused(store.replies.begin("ann", "e" * 255, "e" * 255)) == 429
    monkeypatch.setattr("mempipe.serve.state.database.shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert await refused(store.replies.begin("bob", "a", "a")) == 503


async def test_an_owner_keeps_so_many_bytes_and_all_together_so_many(tmp_path):
    store = open_store(tmp_path, max_owner_bytes=100, max_bytes=150)
    mine, others = await store.documents.create("ann"), await store.documents.create("bob")
    await store.documents.append(mine.id, "ann", b"x" * 90, start=None)
    assert await refused(store.documents.append(mine.id, "ann", b"x" * 11, start=None)) == 429
    assert await refused(store.documents.append(others.id, "bob", b"x" * 70, start=None)) == 503
    await store.documents.append(others.id, "bob", b"x" * 60, start=None)
    await store.documents.delete(mine.id, "ann")
    again = await store.documents.create("ann")
    await store.documents.append(again.id, "ann", b"x" * 40, start=None)
    for name, kept in (("1", True), ("2", True), ("3", False)):  # the oldest response makes room, documents do not
        body = "x" * (50 if name != "3" else 70)
        assert await store.responses.keep(StoredResponse(id=name, body=body, memory=""), "ann") is kept
    assert await refused(store.responses.get("1", "ann")) == 404


async def test_nothing_that_grows_is_taken_when_the_disk_is_nearly_full_and_deletes_work(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    document, session = await store.documents.create("ann"), await store.sessions.create("ann")
    await store.documents.append(document.id, "ann", b"x", start=None)
    monkeypatch.setattr("mempipe.serve.state.database.shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    for call in (store.documents.append(document.id, "ann", b"y", start=None), store.sessions.create("ann")):
        assert await refused(call) == 503
    await store.sessions.claim(session.id, "ann", for_s=5)
    await store.sessions.release(session.id, "known")
    await store.documents.delete(document.id, "ann")


async def test_on_a_full_disk_deletes_use_the_reserve(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    document, session = await store.documents.create("ann"), await store.sessions.create("ann")
    once, reserve = store.database._once, tmp_path / "reserve"

    def on_a_full_disk(work):
        if reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return once(work)

    monkeypatch.setattr(store.database, "_once", on_a_full_disk)
    assert reserve.stat().st_size == 4 * 2**20
    assert await refused(store.documents.append(document.id, "ann", b"x", start=None)) == 503
    await store.documents.delete(document.id, "ann")
    await store.sessions.claim(session.id, "ann", for_s=5)
    await store.sessions.release(session.id, None)
    assert reserve.exists()


def fill(disk: Path) -> None:
    """Takes what is free on a disk, as another program may at any time."""
    size = 2**16
    with (disk / "filler").open("ab", buffering=0) as filler:
        while size:
            try:
                filler.write(bytes(size))
            except OSError:
                size //= 2


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a disk")
async def test_deletes_and_questions_go_on_however_long_the_disk_stays_full(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.serve.state.database._LEAST_FREE", 0)
    with small_disk(tmp_path / "disk", megabytes=12) as disk:
        store = open_store(disk)
        session, *documents = [
            await store.sessions.create("ann"),
            *[await store.documents.create("ann") for _ in "123"],
        ]
        for document in documents:
            await store.documents.append(document.id, "ann", bytes(500_000), start=None)
        for document in documents:
            fill(disk)
            assert await refused(store.documents.append(document.id, "ann", bytes(500_000), start=None)) == 503
            for call in (
                store.sessions.claim(session.id, "ann", for_s=5),
                store.sessions.release(session.id, document.id),
                store.documents.delete(document.id, "ann"),
            ):
                fill(disk)
                await call
        assert (await store.sessions.get(session.id, "ann")).memory == documents[-1].id
        (disk / "filler").unlink()
        await store.documents.create("ann")


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a disk")
async def test_a_service_that_ended_starts_again_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("mempipe.serve.state.database._LEAST_FREE", 0)
    with small_disk(tmp_path / "disk", megabytes=12) as disk:
        store = open_store(disk)
        session = await store.sessions.create("ann")
        store.database._connection.close()
        fill(disk)
        store = open_store(disk)
        fill(disk)
        await store.sessions.claim(session.id, "ann", for_s=5)
        await store.sessions.release(session.id, "kept")
        assert (await store.sessions.get(session.id, "ann")).memory == "kept"


def test_the_reserve_is_filled_as_far_as_the_disk_allows_and_later_to_its_end(tmp_path):
    reserve = Reserve(tmp_path / "reserve")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        reserve.fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "reserve").stat().st_size == 2**20
    for _ in range(2):
        reserve.fill()
        assert (tmp_path / "reserve").stat().st_size == 4 * 2**20
    reserve.free()
    assert not (tmp_path / "reserve").exists()
