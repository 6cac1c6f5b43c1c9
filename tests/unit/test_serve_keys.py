"""API keys: what is kept of them, who gets in, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mempipe.cli import main
from mempipe.serve.http import keys as module
from mempipe.serve.http.errors import ApiError
from mempipe.serve.http.keys import Access, Allowance, KeyRecord, load_keys, new_key
from mempipe.settings import ConfigError


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)


async def whoami(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.05)
    await JSONResponse(scope.get("state", {}).get("owner"))(scope, receive, send)


def client_of(*records: Any, client: str = "127.0.0.1", **limits: int) -> httpx.AsyncClient:
    access = Access(whoami, keys=list(records), **{"per_minute": 600, "at_once": 2, **limits})
    transport = httpx.ASGITransport(app=access, client=(client, 5000))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_line_of_a_key_gives_no_key_away_and_is_read_back(tmp_path, monkeypatch):
    key, record = new_key("ann")
    _, other = new_key("bob")
    secret = key.rpartition("-")[2]
    assert secret not in record.line() and record.is_of(key[len("mp-") + 13 :])
    (tmp_path / "keys").write_text(f"# who\n\n{record.line()}\n")
    monkeypatch.setenv(module.VARIABLE, other.line())
    assert load_keys(str(tmp_path / "keys")) == [record, other]
    assert new_key("ann")[1].hash != record.hash


@pytest.mark.parametrize(
    ("text", "reason"),
    [("ann:secret", "is not NAME:ID:SALT:HASH"), ("# none\n", "holds no key"), (None, "cannot be read")],
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
        assert (await client.get("/healthz")).status_code == 200


async def test_a_key_is_hashed_once_only(monkeypatch):
    key, record = new_key("ann")
    calls = []
    hashed = module._hash
    monkeypatch.setattr(module, "_hash", lambda *args: calls.append(1) or hashed(*args))
    async with client_of(record) as client:
        for _ in range(3):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
    assert len(calls) == 1


async def test_without_keys_only_this_machine_under_its_own_name_is_answered():
    async with client_of() as client:
        assert (await client.get("/v1/models")).json() == "local"
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
    async with client_of(client="10.0.0.7") as client:
        assert (await client.get("/v1/models")).status_code == 403


async def test_too_much_at_once_is_refused_until_there_is_room():
    (key, record), (other, second) = new_key("ann"), new_key("bob")
    async with client_of(record, second) as client:
        await client.get("/v1/models", headers=bearer(key))  # from now on the key is known at once
        answers = await asyncio.gather(*(client.get("/v1/models", headers=bearer(key)) for _ in range(5)))
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
