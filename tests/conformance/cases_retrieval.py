"""How the published case of Search-R1's retrieval server is put to ours, and where we mean to differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from conformance.common import Adapter, Case, Difference
from mempipe.retrieval.config import ServiceConfig
from mempipe.retrieval.retriever import Query
from mempipe.serve.retrieval_app import RetrievalService, make_app
from mempipe.types import Passage, SearchResult

RETRIEVE = "Search-R1 / MEM1:retrieve_endpoint(return_scores=false) unpack (re-stated)"


class OneDocumentEach:
    """Finds for the n-th query the document "dn", as the published case has it."""

    snapshot, num_passages = "s", 1

    def check(self, query: Query) -> None: ...

    def cached(self, query: Query) -> None: ...

    def search(self, queries: Sequence[Query]) -> list[SearchResult]:
        return [
            SearchResult(passages=[Passage(id=f"d{query.text}", title="", text="x")], snapshot=self.snapshot)
            for query in queries
        ]


def retrieve_without_scores(case: Case) -> Any:
    """What the service answers, by HTTP; documents by their id, as the case writes them."""
    # pyrefly: ignore[bad-argument-type]
    service: Any = RetrievalService(OneDocumentEach(), ServiceConfig(index="unused"))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(service)), base_url="http://service"
        ) as client:
            return await client.post(
                "/retrieve", json={"queries": [str(i) for i in range(case["input"]["n_queries"])], "topk": 1}
            )

    response = asyncio.run(post())
    return {
        "status": response.status_code,
        "result": [[document["id"] for document in found] for found in response.json()["result"]],
    }


ADAPTERS: dict[str, Adapter] = {RETRIEVE: retrieve_without_scores}
DIFFERENCES = [
    Difference(
        RETRIEVE,
        lambda case: True,
        lambda case: {"status": 200, "result": [[f"d{i}"] for i in range(case["input"]["n_queries"])]},
        "every query has its list of documents; published, the handler takes one list for two and fails or mixes "
        "them up",
    )
]
