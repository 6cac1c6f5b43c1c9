"""Builds MLflow traces of trajectories: a root span for the question and one span per turn."""

from __future__ import annotations

import dataclasses
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempipe.types import Context, Group, Question, Trajectory

if TYPE_CHECKING:
    from mlflow.entities import Span
    from mlflow.entities.trace_info import TraceInfo


_PREVIEW_CHARS = 500
_ROOT_ID = 1  # span ids count from here; they need to be unique within their trace only


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Says how a trace puts a run's tokens and messages into words."""

    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text, so that turns show their exact prompt; None: they do not."""
    thought: Callable[[str], str] = str.strip
    """The thought in the text of an action; agents differ in how they mark it (`AgentSpec.thought`)."""


def sample_groups(groups: Sequence[Group], *, num_trajectories: int, seed: int) -> list[Group]:
    """Returns at most `num_trajectories` random trajectories of different questions, each in a copy of its group. The
    seed fixes the choice.
    """
    generator = random.Random(seed)
    groups = [group for group in groups if group.trajectories]
    chosen = generator.sample(groups, min(num_trajectories, len(groups)))
    return [dataclasses.replace(group, trajectories=[generator.choice(group.trajectories)]) for group in chosen]


def build_trace(
    trajectory: Trajectory,
    question: Question,
    *,
    step: int,
    run_id: str,
    experiment_id: str,
    wording: Wording = Wording(),
    metadata: Mapping[str, str] | None = None,
    asking: str = "",
) -> tuple[TraceInfo, list[Span]]:
    """Returns the trace of one trajectory, linked to the run.

    Spans follow one another and last as long as the engine and the retriever took; the clock of the trajectory itself
    is not recorded. `metadata` are texts of whoever asked. Ids come from run, step and trajectory, so that a trace
    which is sent again after a fault is still one trace; `asking` tells trajectories with the same id apart.
    """
    from mlflow.entities.trace_info import TraceInfo
    from mlflow.entities.trace_location import TraceLocation
    from mlflow.entities.trace_state import TraceState
    from mlflow.tracing.constant import TRACE_SCHEMA_VERSION, TRACE_SCHEMA_VERSION_KEY, TraceMetadataKey, TraceTagKey

    durations = [round((c.generate_seconds + c.search_seconds) * 1e9) for c in trajectory.contexts]
    end_ns = time.time_ns()
    start_ns = end_ns - sum(durations)
    trace_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{run_id}/{step}/{trajectory.id}{asking}").int
    is_scored = bool(question.golden_answers)  # a question that a service was asked has none
    inputs, outputs = _root_inputs(question), _root_outputs(trajectory, is_scored=is_scored)
    attributes: dict[str, Any] = {
        "trajectory_id": trajectory.id,
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "step": step,
    }
    if metadata:
        attributes["metadata"] = dict(metadata)
    times = (start_ns, end_ns)
    spans = [
        _span("trajectory", "AGENT", trace_id, _ROOT_ID, times, inputs=inputs, outputs=outputs, attributes=attributes)
    ]
    turn_end = start_ns
    for span_id, (context, duration) in enumerate(zip(trajectory.contexts, durations, strict=True), start=_ROOT_ID + 1):
        times = (turn_end, turn_end := turn_end + duration)
        spans.append(_turn_span(context, question, trace_id, span_id, times, wording))
    info = TraceInfo(
        trace_id=spans[0].trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=start_ns // 1_000_000,
        execution_duration=(end_ns - start_ns) // 1_000_000,
        state=TraceState.OK,
        request_preview=question.text[:_PREVIEW_CHARS],
        response_preview=(trajectory.answer or "")[:_PREVIEW_CHARS],
        client_request_id=trajectory.id,
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id, TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION)},
        tags={
            TraceTagKey.TRACE_NAME: "trajectory",
            "step": str(step),
            "end_reason": str(trajectory.end_reason),
            **({"reward": f"{trajectory.reward:.4g}"} if is_scored else {}),
        },
    )
    return info, spans


def _root_inputs(question: Question) -> dict[str, Any]:
    evidence = [dataclasses.asdict(fact) for fact in question.evidence]
    return {
        "question": question.text,
        "golden_answers": question.golden_answers,
        **({"objectives": question.objectives} if question.objectives else {}),
        "num_hops": question.num_hops,
        "evidence": evidence,
    }


def _root_outputs(trajectory: Trajectory, *, is_scored: bool) -> dict[str, Any]:
    names = ("answer", "reward", "em", "f1", "advantage") if is_scored else ("answer",)
    return {name: getattr(trajectory, name) for name in names} | {"end_reason": str(trajectory.end_reason)}


def _turn_span(
    context: Context, question: Question, trace_id: int, span_id: int, times: tuple[int, int], wording: Wording
) -> Span:
    inputs = {"question": question.text, "memory": context.memory_before}
    if wording.decode is not None:
        inputs["prompt"] = wording.decode(context.token_ids[: context.num_prompt_tokens])
    calls = [
        {"query": search.query, "num_passages": search.num_passages, "snapshot": search.snapshot}
        for search in context.searches
    ]
    passages = [dataclasses.asdict(passage) for search in context.searches for passage in search.passages]
    outputs = {"action": context.action, "calls": calls, "passages": passages, "memory": context.memory_after}
    attributes = {
        "thought": wording.thought(context.action),
        "memory_truncated": context.memory_truncated,
        "prompt_tokens": context.num_prompt_tokens,
        "memory_tokens": context.num_memory_tokens,
        "observation_tokens": context.num_observation_tokens,
        "new_memory_tokens": context.num_new_memory_tokens,
        "sampled_tokens": context.num_sampled_tokens,
        "total_tokens": context.num_tokens,
        "policy_versions": sorted({version for version in context.policy_versions if version >= 0}),
        "generate_seconds": context.generate_seconds,
        "search_seconds": context.search_seconds,
    }
    name = f"turn {context.index}"
    return _span(name, "CHAIN", trace_id, span_id, times, inputs=inputs, outputs=outputs, attributes=attributes)


def _span(
    name: str,
    kind: str,
    trace_id: int,
    span_id: int,
    times: tuple[int, int],
    *,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    attributes: dict[str, Any],
) -> Span:
    from mlflow.entities import Span, SpanStatus
    from mlflow.entities.span_status import SpanStatusCode
    from mlflow.tracing.constant import SpanAttributeKey
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, format_trace_id

    values = attributes | {
        SpanAttributeKey.REQUEST_ID: f"tr-{format_trace_id(trace_id)}",
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
    }
    return Span(
        ReadableSpan(
            name=name,
            context=SpanContext(trace_id, span_id, is_remote=False),
            parent=None if span_id == _ROOT_ID else SpanContext(trace_id, _ROOT_ID, is_remote=False),
            resource=Resource.get_empty(),
            attributes={key: json.dumps(value) for key, value in values.items()},
            start_time=times[0],
            end_time=times[1],
            status=SpanStatus(SpanStatusCode.OK).to_otel_status(),
        )
    )
