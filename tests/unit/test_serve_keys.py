"""API keys: what is kept of them, who gets in, and how often."""

from __future__ import annotations

import asyncio
import shutil
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mempipe.answers.errors import ApiError
from mempipe.cli import main
from mempipe.serve.http import keys as module
from mempipe.serve.http.keys import Access, Allowance, KeyRecord, KeyRing, WatchedKeys, load_keys, new_key
from mempipe.settings import ConfigError


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)


async def whoami(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(scope.get("state", {}).get("owner"))(scope, receive, send)


def client_of(*records: Any, app: ASGIApp = whoami, client: str = "127.0.0.1", **limits: int) -> httpx.AsyncClient:
    access = Access(app, keys=KeyRing(records), **{"per_minute": 600, "at_once": 2, **limits})
    transport = httpx.ASGITransport(app=access, client=(client, 5000))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_line_of_a_key_gives_no_key_away_and_is_read_back(tmp_path, monkeypatch):
    key, record = new_key("ann")
    _, other = new_key("bob")
    secret = key[len("mp-") + 13 :]  # it may have hyphens of its own
    assert len(secret) == 43 and secret not in record.line() and record.is_of(secret)
    (tmp_path / "keys").write_text(f"# who\n\n{record.line()}\n")
    monkeypatch.setenv(module.VARIABLE, other.line())
    assert load_keys(str(tmp_path / "keys")) == [record, other]
    assert new_key("ann")[1].hash != record.hash


@pytest.mark.parametrize(
    ("text", "reason"),
    [("ann:secret", "is not NAME:ID:HASH"), ("# none\n", "holds no key"), (None, "cannot be read")],
)
def test_a_file_that_holds_no_keys_is_refused_without_showing_it(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_keys(str(tmp_path / "keys"))
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="name of a key"):
        new_key("a:b")


def test_the_command_shows_the_key_once_and_gives_the_line(capsys):
    assert main(["key", "ann"]) == 0
    line, shown = capsys.readouterr()
    record = KeyRecord.read(line)
    assert record.name == "ann" and record.is_of(shown.strip()[-43:])
    assert main(["key", "a:b"]) == 2


async def test_a_good_key_gets_in_as_its_owner_and_others_do_not():
    key, record = new_key("ann")
    stranger, _ = new_key("ann")
    async with client_of(record, client="10.0.0.7") as client:
        assert (await client.get("/v1/models", headers=bearer(key))).json() == "ann"
        half = key[:-1] + ("A" if key[-1] != "A" else "B")
        for headers in ({}, bearer(stranger), bearer(half), bearer("mp-"), {"authorization": key}, bearer("é")):
            answer = await client.get("/v1/models", headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            wrong = ', error="invalid_token"' if headers else ""
            assert answer.headers["www-authenticate"] == f'Bearer realm="mempipe"{wrong}'
        assert (await client.get("/healthz")).status_code == 200


async def test_a_wrong_secret_costs_one_fast_hash_whether_there_is_such_a_key_or_not(monkeypatch):
    (key, record), (stranger, _) = new_key("ann"), new_key("bob")
    hashed: list[str] = []
    sha256 = module._hash
    monkeypatch.setattr(module, "_hash", lambda secret: hashed.append(secret) or sha256(secret))
    monkeypatch.setattr(module.hashlib, "scrypt", None)
    async with client_of(record) as client:
        for wrong in (stranger, key[:17] + stranger[17:], "mp-", key[:16]):
            hashed.clear()
            assert (await client.get("/v1/models", headers=bearer(wrong))).status_code == 401
            assert len(hashed) == 1
    started = time.process_time()
    for _ in range(1000):
        record.is_of(stranger[17:])
    assert time.process_time() - started < 1.0  # a slow hash takes longer for ten of them


async def test_a_change_of_the_file_holds_from_the_next_request_on(tmp_path, caplog):
    (key, record), (other, second), file = new_key("ann"), new_key("bob"), tmp_path / "keys"
    file.write_text(record.line() + "\n")
    ring = WatchedKeys(str(file))
    access = Access(whoami, keys=ring, per_minute=600, at_once=2)
    transport = httpx.ASGITransport(app=access, client=("10.0.0.7", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:

        async def statuses() -> list[int]:
            return [(await client.get("/v1/models", headers=bearer(each))).status_code for each in (key, other)]

        assert await statuses() == [200, 401]
        file.write_text(f"{record.line()}\n{second.line()}\n")
        assert await statuses() == [200, 200]
        file.write_text(f"# ann left\n{second.line()}\n")
        assert await statuses() == [401, 200]
        file.write_text("not a key\n")
        assert await statuses() == [401, 200] and "stay as they are" in caplog.text
        file.unlink()
        assert await statuses() == [401, 200]
        file.write_text("# nobody\n")
        assert await statuses() == [401, 401]


def test_a_mounted_secret_that_changes_revokes_a_key(tmp_path):
    """The kubelet never writes to the file: it turns the link to the folder of all files to another folder."""
    (_, record), (_, second) = new_key("ann"), new_key("bob")  # the new file is as large as the old one

    def mounted(line: str, folder: str) -> None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lines").write_text(line)
        (tmp_path / "..data_tmp").symlink_to(folder)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    mounted(record.line(), "..2026_1")
    (tmp_path / "lines").symlink_to("..data/lines")
    ring = WatchedKeys(str(tmp_path / "lines"))
    assert ring.find(record.id) == record
    mounted(second.line(), "..2026_2")
    shutil.rmtree(tmp_path / "..2026_1")
    assert (ring.find(record.id), ring.find(second.id)) == (None, second)


def test_two_keys_of_one_name_are_refused(tmp_path):
    """They would share sessions and documents."""
    (tmp_path / "keys").write_text("\n".join(new_key("ann")[1].line() for _ in range(2)))
    with pytest.raises(ConfigError, match="have the name 'ann'"):
        load_keys(str(tmp_path / "keys"))


def test_a_line_of_an_earlier_version_is_named(tmp_path):
    (tmp_path / "keys").write_text(f"ann:{'0' * 12}:{'0' * 32}:{'0' * 64}")
    with pytest.raises(ConfigError, match="earlier version"):
        load_keys(str(tmp_path / "keys"))


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:8000": 200,
    "LOCALHOST:80": 200,
    "[::1]": 200,
    "[::1]:8000": 200,
    "127.0.0.1:80@evil.com": 403,
    "127.0.0.1.evil.com": 403,
    "evil.com:127.0.0.1": 403,
    "": 403,
}


@pytest.mark.parametrize("host", HOSTS)
async def test_the_host_is_this_machine_by_its_whole_name(host):
    async with client_of() as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == HOSTS[host]


async def test_pages_of_other_sites_are_refused_where_no_key_is_needed():
    key, record = new_key("ann")
    async with client_of() as client, client_of(record) as guarded:
        own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        assert (await client.post("/v1/sessions", headers=own)).status_code == 200
        others = ({"origin": "https://evil.com"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"})
        others += ({"origin": "http://127.0.0.1:9"}, {"sec-fetch-site": "same-site"})
        for headers in others:
            headers |= {"content-type": "text/plain"}
            assert (await client.post("/v1/sessions", headers=headers)).status_code == 403
            assert (await guarded.post("/v1/sessions", headers=headers | bearer(key))).status_code == 200


async def test_without_keys_only_this_machine_under_its_own_name_is_answered():
    async with client_of() as client:
        assert (await client.get("/v1/models")).json() == "local"
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
    async with client_of(client="10.0.0.7") as client:
        assert (await client.get("/v1/models")).status_code == 403


async def test_too_much_at_once_is_refused_until_there_is_room():
    (key, record), (other, second) = new_key("ann"), new_key("bob")
    go_on = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await whoami(scope, receive, send)

    async with client_of(record, second, app=waits) as client:
        asking = [asyncio.create_task(client.get("/v1/models", headers=bearer(key))) for _ in range(5)]
        while sum(task.done() for task in asking) < 3:
            await asyncio.sleep(0.005)
        go_on.set()
        answers = await asyncio.gather(*asking)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"
        assert (await client.get("/v1/models", headers=bearer(other))).status_code == 200
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200


def test_a_bucket_holds_a_tenth_of_a_minute_and_fills_again(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    allowance = Allowance(per_minute=60, at_once=100)
    for _ in range(6):
        allowance.take()
    with pytest.raises(ApiError, match="60 requests a minute"):
        allowance.take()
    now += 1.0
    allowance.take()
    with pytest.raises(ApiError):
        allowance.take()


@pytest.mark.parametrize(("per_minute", "seconds"), [(1, 30), (6, 10), (600, 1)])
async def test_who_asks_too_often_is_told_when_the_bucket_holds_a_request_again(monkeypatch, per_minute, seconds):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    key, record = new_key("ann")
    async with client_of(record, per_minute=per_minute) as client:
        for _ in range(max(per_minute // 10, 1)):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        refused = await client.get("/v1/models", headers=bearer(key))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == seconds == int(refused.headers["retry-after-ms"]) / 1000
