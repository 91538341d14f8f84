"""The Draft service: what a draft worker answers verifiers. The only module here that knows the
stub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from engine.speculation.draft_protocol import DraftModelInfo, DraftRequest
from process import rpc
from process.deadline import Deadline
from process.errors import Unavailable
from protos import draft_pb2, draft_pb2_grpc
from services.draft.thread import DraftThread

SERVICE = "baton.v1.Draft"

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """See the proto.

    Args:
        max_call_s: for a call whose caller gives none, or more.
        why_not_ready: empty: calls are taken.
    """

    def __init__(
        self,
        thread: DraftThread,
        model_info: DraftModelInfo,
        *,
        worker_id: str,
        incarnation: bytes,
        max_call_s: float,
        why_not_ready: Callable[[], str],
    ) -> None:
        self._thread = thread
        self._max_call_s = max_call_s
        self._why_not_ready = why_not_ready
        self._description = draft_pb2.DescribeDraftReply(
            worker_id=worker_id,
            incarnation=incarnation,
            model=model_info.model,
            tokenizer_digest=model_info.tokenizer_digest,
            vocab_size=model_info.vocab_size,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        draft_pb2_grpc.add_DraftServicer_to_server(self, server)

    @rpc.unary
    async def Describe(
        self, request: draft_pb2.DescribeDraftRequest, context: Context
    ) -> draft_pb2.DescribeDraftReply:
        self._check_ready()
        return self._description

    @rpc.unary
    async def Propose(
        self, request: draft_pb2.ProposeRequest, context: Context
    ) -> draft_pb2.ProposeReply:
        self._check_ready()
        left_s = context.time_remaining()
        budget_s = self._max_call_s if left_s is None else min(self._max_call_s, left_s)
        requests = [_draft_request(task) for task in request.tasks]
        answers = await self._thread.propose(request.verifier, requests, Deadline.after(budget_s))
        return draft_pb2.ProposeReply(
            trees=[
                draft_pb2.DraftTree(
                    is_unknown=not answer.is_known,
                    token_ids=answer.token_ids,
                    parents=answer.parents,
                    chances=answer.chances,
                )
                for answer in answers
            ]
        )

    @rpc.unary
    async def Forget(
        self, request: draft_pb2.ForgetRequest, context: Context
    ) -> draft_pb2.ForgetReply:
        self._check_ready()
        self._thread.forget(request.verifier, list(request.sessions))
        return draft_pb2.ForgetReply()

    def _check_ready(self) -> None:
        why_not = self._why_not_ready()
        if why_not:
            raise Unavailable(why_not)


def _draft_request(task: draft_pb2.DraftTask) -> DraftRequest:
    return DraftRequest(
        task.session,
        task.start,
        list(task.token_ids),
        task.num_prompt_tokens,
        task.num_nodes,
        task.temperature,
        task.top_p,
        task.top_k,
        task.min_p,
        task.seed,
        task.sample_index,
    )
