"""A sample of what a service answers, as MLflow traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from service_builders import QUESTIONS, build_service, config_of, running

from mempipe.engines.config import SamplingConfig
from mempipe.serve.config import AgentServiceConfig
from mempipe.serve.replicas import traces
from mempipe.serve.replicas.traces import SampledTraces
from mempipe.serve.served_run import ServedRun
from mempipe.tracking.config import TrackingConfig
from mempipe.tracking.traces import build_trace
from mempipe.tracking.tracker import last_run_id
from mempipe.types import Group

QUESTION = QUESTIONS[0]


def served(folder, uri: str) -> ServedRun:
    config = config_of("memsearcher").model_copy(update={"tracking": TrackingConfig(uri=uri)})
    sampling = SamplingConfig(temperature=0.0)
    service = AgentServiceConfig()
    return ServedRun(config=service, name="tiny", agents={"memsearcher": config}, sampling=sampling, state=folder)


@pytest.mark.slow  # an MLflow store
def test_an_answer_is_a_trace_of_the_services_own_run(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mempipe.serve.replicas.traces.FINISH_TIMEOUT_S", 120.0
    )  # a busy machine makes a database slowly
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    of_service = served(tmp_path, uri)
    for _ in range(2):  # a restart continues with the same MLflow run
        recorder = SampledTraces(of_service, share=1.0, decode=tokenizer.decode)
        service = build_service(tokenizer, tmp_path, record=recorder.record)
        with running(service):
            body = {"question": QUESTION.text, "metadata": {"ticket": "17"}}
            reply = httpx.post(f"{service.url}/v1/answer", json=body, timeout=20).json()
        recorder.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = client.search_experiments(filter_string="name = 'mempipe'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == (last_run_id(tmp_path), "service of tiny")
    found = client.search_traces(locations=[experiment.experiment_id], run_id=run.info.run_id)
    assert len(found) == 2
    root, *turns = found[0].data.spans
    assert root.inputs["question"] == QUESTION.text
    assert root.attributes["metadata"] == {"ticket": "17"}
    answer = root.outputs.pop("answer").strip()  # as it was sampled
    assert (answer, root.outputs) == (reply["answer"], {"end_reason": "answered"})  # nobody scored it
    assert [turn.attributes["thought"] for turn in turns] == [turn["thought"] for turn in reply["turns"]]
    assert f"{reply['id']}/0" in {trace.info.client_request_id for trace in found}


def test_only_a_share_is_recorded_and_a_dead_server_costs_no_memory(tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(traces, "FINISH_TIMEOUT_S", 0.1)
    groups = []
    service = build_service(tokenizer, tmp_path, record=lambda *played: groups.append(played))
    with running(service):
        httpx.post(f"{service.url}/v1/answer", json={"question": QUESTION.text}, timeout=20)
    recorder = SampledTraces(served(tmp_path, "http://127.0.0.1:9"), share=0.5, decode=tokenizer.decode)
    monkeypatch.setattr(traces.random, "random", iter([0.4, 0.6] * 100).__next__)
    try:
        for _ in range(20):
            recorder.record(*groups[0])
        assert recorder._writer.num_waiting == 10 + 1  # and the config
        for _ in range(180):
            recorder.record(*groups[0])
        assert recorder._writer.num_waiting == traces.MAX_WAITING
    finally:
        recorder.close()
    (warning,) = [record.message for record in caplog.records if "incomplete" in record.message]
    assert "metrics.jsonl" not in warning  # a service has none


def test_requests_with_the_same_id_have_each_a_trace(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(traces, "MlflowRun", lambda *_, **__: None)
    writer = SimpleNamespace(num_waiting=0, add_call=calls.append)
    monkeypatch.setattr(traces, "BackgroundWriter", lambda run: writer)
    recorder = SampledTraces(served(tmp_path, ""), share=1.0, decode=tokenizer.decode)
    with running(build_service(tokenizer, tmp_path, record=recorder.record)) as url:
        for _ in range(2):
            body, headers = {"question": QUESTION.text}, {"x-request-id": "job-17"}
            assert httpx.post(f"{url}/v1/answer", json=body, headers=headers, timeout=20).json()["id"] == "job-17"

    def trace_ids(call: Any) -> list[str]:
        found = []

        def log_trace(group: Group, **asked: Any) -> None:
            for each in group.trajectories:
                info, _ = build_trace(each, group.question, run_id="run", experiment_id="0", **asked)
                found.append(info.trace_id)

        call(SimpleNamespace(log_trace=log_trace))
        return found

    _, first, second = calls  # the config comes before them
    assert trace_ids(first) == trace_ids(first) != trace_ids(second)
