"""inspect-ai: tasks with the provider `openai-api`, by chat completions and by responses."""

from __future__ import annotations

import asyncio

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, system_message, use_tools, user_message
from inspect_ai.tool import think
from inspect_ai.util import JSONSchema
from served import GOLD, KEY, QUESTION, URL, engine

REFUSED = "which this service cannot do; leave it out"
SETTINGS = {"max_tokens": 60, "temperature": 0.0, "seed": 3, "max_retries": 0}


def model_of(**model_args):
    return get_model("openai-api/mempipe/tiny", base_url=URL, api_key=KEY, memoize=False, **model_args)


def evaluated(tmp_path, *steps, target=GOLD, settings=(), **model_args):
    """Returns the log of a task of three samples."""
    model = model_of(config=GenerateConfig(**{**SETTINGS, **dict(settings)}), **model_args)
    samples = [Sample(id=number, input=QUESTION, target=target) for number in (1, 2, 3)]
    task = Task(dataset=MemoryDataset(samples), solver=[system_message("be brief"), *steps], scorer=exact())
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path))
    return log


@pytest.mark.parametrize("model_args", [{}, {"stream": True}, {"responses_api": True}], ids=str)
def test_a_task_is_scored_and_its_tokens_are_counted(tmp_path, model_args):
    engine()
    log = evaluated(tmp_path, generate(), **model_args)
    seen = engine()
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == [GOLD] * 3
    assert log.results.scores[0].metrics["mean"].value == 1.0
    usage = log.samples[0].output.usage
    assert usage.output_tokens and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "heed be brief" in seen["prompts"][0] and max(seen["limits"]) <= 60


def test_a_second_question_has_the_first_in_its_history(tmp_path):
    engine(*[GOLD] * 3, *["yes"] * 3)
    log = evaluated(tmp_path, generate(), user_message("so?"), generate(), target="yes")
    assert log.status == "success", log.error
    prompts = engine()["prompts"]
    assert all(QUESTION in prompt and GOLD in prompt for prompt in prompts if "so?" in prompt)
    assert sum("so?" in prompt for prompt in prompts) == 3


def test_responses_in_the_history_bring_the_memory_back(tmp_path):
    engine()
    log = evaluated(tmp_path, generate(), user_message("so?"), generate(), responses_api=True)
    assert log.status == "success", log.error
    first = next(prompt for prompt in engine()["prompts"] if "so?" in prompt)
    assert first.count(GOLD) == 2  # in a fact of the memory, and as the last answer


def test_tools_and_a_response_schema_are_refused_by_name(tmp_path):
    log = evaluated(tmp_path, use_tools(think()), generate())
    assert log.status == "error" and "tools is " in log.error.message and REFUSED in log.error.message
    schema = ResponseSchema(name="answer", json_schema=JSONSchema(type="object", properties={}))
    log = evaluated(tmp_path, generate(), settings={"response_schema": schema})
    assert log.status == "error" and "response_format is " in log.error.message and REFUSED in log.error.message


def test_a_model_is_asked_without_a_task():
    model = model_of()
    assert asyncio.run(model.generate(QUESTION)).completion == GOLD
    settings = GenerateConfig(num_choices=2, temperature=1.0, stop_seqs=[" and"], max_retries=0)
    engine("Oslo", "Lima and more")
    output = asyncio.run(model.generate("where?", config=settings))
    assert sorted(choice.message.text for choice in output.choices) == ["Lima", "Oslo"]
