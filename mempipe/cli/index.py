"""The commands that build, open, search and serve passage indexes."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mempipe.checks.findings import refuse
from mempipe.cli.commands import add_command
from mempipe.progress import say
from mempipe.settings import ConfigError


def add_commands(commands: Any) -> None:
    """Adds the commands that build, open and search passage indexes."""
    index = commands.add_parser("index", help="build, search or serve a passage index")
    index = index.add_subparsers(required=True, metavar="build|adopt|search|serve")
    build = add_command(
        index,
        "build",
        _index_build,
        "build an index folder from a corpus; resumes an interrupted build",
        continues=True,
    )
    build.add_argument(
        "source", help="a YAML file, e.g. jobs/configs/index_wiki18_e5.yaml, or passages or texts (with output=FOLDER)"
    )
    build.add_argument("overrides", nargs="*", default=[], help="key=value with dotted keys, e.g. faiss.factory=SQfp16")
    adopt = add_command(index, "adopt", _index_adopt, "open an existing faiss index and its jsonl corpus as they are")
    adopt.add_argument("index", help="e.g. e5_Flat.index")
    adopt.add_argument("corpus", help="the plain jsonl file that it was built from, e.g. wiki-18.jsonl")
    adopt.add_argument("output")
    adopt.add_argument("encoder", nargs="+", help="key=value, e.g. kind=huggingface path=intfloat/e5-base-v2")
    adopt.add_argument("--search", default="", help="faiss search parameters, e.g. nprobe=64")
    search = add_command(index, "search", _index_search, "print the best passages for a query")
    search.add_argument("index")
    search.add_argument("query")
    search.add_argument("--num-passages", type=int, default=5)
    search.add_argument("--partition", default="")
    search.add_argument("--mode", default="auto", choices=["auto", "dense", "lexical", "fusion"])
    search.add_argument("--json", action="store_true")
    serve = add_command(index, "serve", _index_serve, "answer searches over HTTP on this machine until Ctrl-C")
    serve.add_argument("index")
    serve.add_argument(
        "overrides", nargs="*", help="key=value, e.g. max_in_flight=128 (mempipe/serve/retrieval_app.py)"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 to be reached from other machines; callers need no password",
    )
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--num-replicas", type=int, default=1)


def _index_build(arguments: argparse.Namespace) -> None:
    from mempipe.loader import load_job

    kind, config = load_job(arguments.source, arguments.overrides, kind="index")
    refuse(kind.findings(config))
    say(f"{config.output}: checked; loading")
    print("\n".join(describe_index(kind.run(config), config.output)))


def _index_adopt(arguments: argparse.Namespace) -> None:
    from mempipe.loader import parse_overrides

    encoder = parse_overrides(arguments.encoder)
    for path in (arguments.index, arguments.corpus):
        if not Path(path).is_file():
            raise ConfigError(f"{path} does not exist")
    from mempipe.retrieval.adopt import adopt_index
    from mempipe.retrieval.encoders import make_encoder

    files = Path(arguments.index), Path(arguments.corpus), Path(arguments.output)
    manifest = adopt_index(*files, encoder=make_encoder(encoder), search=arguments.search)
    print("\n".join(describe_index(manifest, arguments.output)))


def describe_index(manifest, folder: str) -> list[str]:
    """Returns lines that describe an index for people."""
    count = manifest.passages.count
    lines = [f"{folder}: {count:,} passage{'s' * (count != 1)}"]
    if skipped := manifest.passages.skipped:
        lines.append("  skipped: " + ", ".join(f"{count} {kind}" for kind, count in skipped.items()))
    if vectors := manifest.vectors:
        measured = f"recall@10 {vectors.recall_at_10} against Flat, {vectors.num_recall_queries} passages as queries"
        kind, shards = vectors.encoder["kind"], len(vectors.files)
        lines.append(
            f"  vectors: {kind}, {vectors.dimension} dimensions, {vectors.factory}, {shards} shard{'s' * (shards > 1)}"
        )
        lines.append("  " + ("exact search" if vectors.recall_at_10 is None else measured))
    if manifest.lexical:
        lines.append("  words: BM25")
    size = sum(record.bytes for record in manifest.files.values())
    return [*lines, f"  {size / 2**20:,.1f} MiB.  Next: mempipe index search {shlex.quote(str(folder))} 'a question'"]


def _index_search(arguments: argparse.Namespace) -> None:
    from mempipe.retrieval.manifest import check_index

    if not arguments.query.strip():
        raise ConfigError("the query is empty")
    check_index(arguments.index, mode=arguments.mode)
    from mempipe.retrieval.retriever import Query, Retriever

    retriever = Retriever(arguments.index, mode=arguments.mode)
    query = Query(text=arguments.query, num_passages=arguments.num_passages, partition=arguments.partition)
    try:
        (found,) = retriever.search([query])
    except ValueError as error:
        raise ConfigError(f"index {arguments.index}: {error}") from error
    if arguments.json:
        print(json.dumps([asdict(passage) for passage in found.passages], ensure_ascii=False, indent=1))
        return
    if not found.passages:
        print("No passage has a word of the query.")
        return
    from mempipe.reports.terminal import console, table

    shown = table("score", "title", "text", "id")
    for passage in found.passages:
        shown.add_row(f"{passage.score:.3f}", passage.title, passage.text[:300], passage.id)
    console().print(shown)


def _index_serve(arguments: argparse.Namespace) -> None:
    from mempipe.checks.retrieval import check_service
    from mempipe.loader import parse_overrides, parse_section
    from mempipe.retrieval.config import ServiceConfig

    settings = {"index": arguments.index, "num_replicas": arguments.num_replicas} | parse_overrides(arguments.overrides)
    refuse(check_service(parse_section(settings, ServiceConfig), host=arguments.host, port=arguments.port))
    from mempipe.serve.local import exit_now
    from mempipe.serve.retrieval import serve_index

    serve_index(settings, host=arguments.host, port=arguments.port)
    exit_now()
