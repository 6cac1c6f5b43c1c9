"""Clients of the OpenAI API that no extra installs, unchanged against the agent service.

With `pip install instructor inspect-ai`, or `pip install llama-index-llms-openai-like` in an environment of its own (it
needs an older openai), these tests run; without them they are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from service_builders import QUESTIONS, Service, build_service, running

from mempipe.engines.tiny import build_tokenizer
from mempipe.engines.tokenizer import load_tokenizer

TWO_HOPS = next(question for question in QUESTIONS if question.num_hops == 2)
GOLD = TWO_HOPS.golden_answers[0]
SAYS = "so</think>\\boxed{{ {}}}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    build_tokenizer(folder)
    with running(service := build_service(load_tokenizer(str(folder)), folder)):
        yield service


@pytest.fixture
def service(shared) -> Iterator[Service]:
    shared.engine.limits.clear()
    yield shared
    shared.engine.says.clear()


def test_llama_index_chats_streams_and_completes(service):
    llama = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")
    core = pytest.importorskip("llama_index.core.llms")
    of_chat, of_text = (
        llama.OpenAILike(
            model="tiny",
            api_base=f"{service.url}/v1",
            api_key="none",
            is_chat_model=is_chat,
            max_tokens=60,
            temperature=0,
            max_retries=0,
        )
        for is_chat in (True, False)
    )
    said = [core.ChatMessage(role="system", content="be brief"), core.ChatMessage(role="user", content=TWO_HOPS.text)]
    reply = of_chat.chat(said)
    assert reply.message.content == GOLD and max(service.engine.limits) <= 60
    assert [*of_chat.stream_chat(said)][-1].message.content == GOLD
    assert of_text.complete(TWO_HOPS.text).text == GOLD
    service.engine.says[:] = [SAYS.format("yes")]
    assert of_chat.chat([*said, reply.message, core.ChatMessage(role="user", content="so?")]).message.content == "yes"


def test_instructor_is_refused_by_name_where_it_needs_a_tool(service):
    """Its other modes want JSON of the model, which an agent that answers questions does not write."""
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", text=(str, ...))
    plain = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    said = [{"role": "user", "content": TWO_HOPS.text}]
    for mode, field in ((instructor.Mode.TOOLS, "tool_choice"), (instructor.Mode.JSON, "response_format")):
        client = instructor.from_openai(plain, mode=mode)
        with pytest.raises(Exception, match=field):
            client.chat.completions.create(model="tiny", messages=said, response_model=answer, max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    reply = client.chat.completions.create(model="tiny", messages=said, response_model=None)
    assert reply.choices[0].message.content == GOLD


def test_inspect_evaluates_the_agent_on_a_task(service, tmp_path):
    inspect = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")
    dataset = pytest.importorskip("inspect_ai.dataset")
    solver, scorer = pytest.importorskip("inspect_ai.solver"), pytest.importorskip("inspect_ai.scorer")
    model = pytest.importorskip("inspect_ai.model")
    task = inspect.Task(
        dataset=dataset.MemoryDataset([dataset.Sample(id=i, input=TWO_HOPS.text, target=GOLD) for i in (1, 2, 3)]),
        solver=[solver.system_message("be brief"), solver.generate()],
        scorer=scorer.exact(),
    )
    settings = model.GenerateConfig(max_tokens=60, temperature=0.0, seed=3, max_retries=0)
    agent = model.get_model(
        "openai-api/mempipe/tiny", base_url=f"{service.url}/v1", api_key="none", config=settings, memoize=False
    )
    (log,) = inspect.eval(task, model=agent, display="none", log_dir=str(tmp_path), fail_on_error=True)
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == [GOLD] * 3
    assert log.results.scores[0].metrics["mean"].value == 1.0
    usage = log.samples[0].output.usage
    assert usage.output_tokens and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert max(service.engine.limits) <= 60
