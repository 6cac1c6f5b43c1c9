"""The code of docs/clients.md runs from top to bottom against a service, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from service_builders import WorldEngine, build_service, running

from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


class KnowsTheFounder(WorldEngine):
    """Answers the page's second question too, which no script of the synthetic world knows."""

    def _scripted(self, prompt: str) -> str:
        if "Who founded it?" in prompt:
            return "it is known</think>\\boxed{ Osvin}"
        return super()._scripted(prompt)


def test_the_code_of_the_page_prints_what_the_page_says(tmp_path, capsys):
    pytest.importorskip("langchain_openai", reason="langchain-openai of the extra `dev` is not installed")
    build_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    service = build_service(tokenizer, tmp_path)
    service.engine = KnowsTheFounder(tokenizer)
    examples, names = EXAMPLE.findall(PAGE.read_text()), dict[str, Any]()
    assert len(examples) == PAGE.read_text().count("```python\n") == 3
    with running(service):
        for number, (code, expected) in enumerate(examples, start=1):
            code = code.replace("http://127.0.0.1:8000", service.url).replace('"quickstart"', '"tiny"')
            exec(compile(code, f"{PAGE.name}, example {number}", "exec"), names)
            assert capsys.readouterr().out.strip() == expected.strip()
    prompts = [prompt for prompt in service.engine.prompts if "Who founded it?" in prompt]
    assert len(prompts) == 2 and all("Cypherdyne founder Osvin" in prompt for prompt in prompts)
