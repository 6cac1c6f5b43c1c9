"""Checks whether an index can be built, and whether a retrieval service can start."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mempipe.checks.findings import Finding, attempt, fatal, note, ok
from mempipe.checks.machine import check_cluster, check_local_service, check_writable
from mempipe.checks.models import check_encoder, check_hub, check_model
from mempipe.data.input_files import is_remote
from mempipe.data.plain_text import check_source
from mempipe.masking.documents import DocumentsConfig
from mempipe.retrieval.config import IndexConfig, ServiceConfig
from mempipe.retrieval.encoders import ENCODERS
from mempipe.retrieval.manifest import check_index, read_manifest
from mempipe.storage.files import check_new_folder

FOUND_IN_THE_MODEL = {"dimension", "fingerprint"}
"""Keys of an encoder in an index's manifest that are not settings."""


def check_build(config: IndexConfig) -> list[Finding]:
    """Returns all findings about an index that is to be built."""
    findings = [_output(Path(config.output)), *_corpus(config.corpus)]
    if config.encoder is not None:
        findings += _encoder(config.encoder)
    if any(finding.fatal for finding in findings):
        return findings
    if config.ray_address:
        findings += check_cluster(config.ray_address)
    return findings + _encoder_on_the_hub(config.encoder or {})


def check_service(config: ServiceConfig, *, host: str = "", port: int = 0) -> list[Finding]:
    """Returns all findings about a retrieval service, on this machine when `host` and `port` are given."""
    findings = [
        attempt(lambda: check_index(config.index, mode=config.mode, num_gpus=config.num_gpus), f"index: {config.index}")
    ]
    if not findings[0].fatal:
        findings += _served_encoder(config)
    if host:
        findings += check_local_service(host, port, deployed_by="jobs/configs/retrieval_service.yaml")
    return findings


def check_documents(config: DocumentsConfig) -> list[Finding]:
    """Returns all findings about MemTrain documents that are to be made of an index."""
    folder = Path(config.output) / config.name
    return [
        attempt(lambda: check_index(config.index, mode="auto", num_gpus=0), f"index: {config.index}"),
        *check_model(config.tokenizer, setting="tokenizer"),
        ok(f"{folder} exists; the build will resume") if folder.exists() else check_writable(folder, setting="output"),
        *check_hub(config.tokenizer, setting="tokenizer"),
    ]


def _output(folder: Path) -> Finding:
    made = attempt(lambda: check_new_folder(folder, setting="output"), f"output: {folder}")
    return made if made.fatal else check_writable(folder, setting="output")


def _corpus(sources: Sequence[str]) -> list[Finding]:
    if not sources:
        return [fatal("corpus is empty; it lists files or folders of passages")]
    return [
        note(f"corpus: {source}, to be read when the build starts")
        if is_remote(source)
        else attempt(lambda source=source: check_source(source), f"corpus: {source}")
        for source in sources
    ]


def _encoder(spec: dict[str, Any]) -> list[Finding]:
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in ENCODERS:
        return [fatal(f"encoder.kind is {kind!r}; it must be {', '.join(map(repr, ENCODERS))}")]
    known = inspect.signature(ENCODERS[kind]).parameters.keys() | FOUND_IN_THE_MODEL
    if unknown := sorted(spec.keys() - known - {"kind"}):
        return [fatal(f"encoder.{unknown[0]} is not a setting of {kind!r}, which has {', '.join(sorted(known))}")]
    if "path" not in known:
        return [ok(f"encoder: {kind}")]
    return check_encoder(str(spec.get("path", "")), setting="encoder.path")


def _encoder_on_the_hub(spec: dict[str, Any]) -> list[Finding]:
    return check_hub(str(spec["path"]), setting="encoder.path") if spec.get("path") else []


def _served_encoder(config: ServiceConfig) -> list[Finding]:
    manifest, _ = read_manifest(Path(config.index))
    if manifest.vectors is None or config.mode == "lexical":
        return []
    path = config.encoder_path or manifest.vectors.encoder.get("path", "")
    if not path:
        return []
    found = check_encoder(path, setting="encoder_path")
    return found if any(finding.fatal for finding in found) else [*found, *check_hub(path, setting="encoder_path")]
