"""No message shows the password of an address."""

from __future__ import annotations

import logging
import pickle

import pytest

from mempipe.credentials import without_credentials, without_passwords
from mempipe.faults import ServiceTimeout
from mempipe.loader import parse_config
from mempipe.retrieval.config import RetrievalConfig
from mempipe.retrieval.remote import RemoteRetriever
from mempipe.settings import ConfigError

HARD = ("p@ssw0rd", "pa/ss", "/p@/ss@", "80/a", "p:a:ss", "")


@pytest.mark.parametrize("password", HARD)
def test_a_password_of_any_characters_is_left_out(password):
    for scheme in ("http", "postgresql", "mysql+pymysql"):
        text = f"at '{scheme}://me:{password}@host:5432/x': no"
        assert without_passwords(text) == f"at '{scheme}://***@host:5432/x': no"
    assert without_credentials({"a": [f"s3://:{password}@host"]}) == {"a": ["s3://***@host"]}


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/v1 is away; ask me@example.org",
        "hf://datasets/OWNER/NAME@revision/train.jsonl",
        "s3://bucket/key@v1",
        '{"url":"http://host:80","mail":"a@b"}',
        "me@example.org",
    ],
)
def test_what_is_no_password_stays(text):
    assert without_passwords(text) == text


def test_a_name_without_a_password_is_left_out_too():
    assert without_passwords("https://token@host/x https://a@b@host") == "https://***@host/x https://***@host"


@pytest.mark.parametrize("url", ["ftp://me:q@zk/xw@host", "http://me:q@/zk/xw@host"])
def test_a_refused_setting_shows_no_password(url):
    for values in ({"retrieval": {"url": url}}, {"warm_start": {"teacher": {"url": url, "model": "m"}}}):
        with pytest.raises(ConfigError) as caught:
            parse_config(values)
        assert "url" in str(caught.value) and "zk" not in str(caught.value) and "xw" not in str(caught.value)
        assert "xw" not in str(pickle.loads(pickle.dumps(caught.value)))


def test_a_service_that_is_away_is_named_without_its_password(caplog):
    config = RetrievalConfig(timeout_s=0.2)
    with caplog.at_level(logging.DEBUG), pytest.raises(ServiceTimeout) as caught:
        RemoteRetriever("http://me:s3cr@t@127.0.0.1:1", config)
    assert "http://***@127.0.0.1:1" in str(caught.value) and "retrieval.timeout_s" in str(caught.value)
    assert "s3cr" not in str(caught.value) + caplog.text
