"""Replies without payload, checked and turned into results. A reply that cannot be right is a failure, not a hit."""

from __future__ import annotations

from typing import TypeAlias

from google.protobuf.message import DecodeError

from kvstore_api.limits import HASH_BYTES
from kvstore_api.namespace import ReplayMode
from kvstore_api.results import PutResult, PutStatus
from kvstore_api.resume import ResumePlan
from kvstore_api.v1 import block_store_pb2, types_pb2
from kvstore_client.errors import BadReplyError, KVStoreConfigError, clean_reason
from kvstore_client.results import NO_RESULT, Failure, MatchResult, PutReport

PutReplies: TypeAlias = list[types_pb2.PutResult]


def check_registration(reply_bytes: bytes, digest: bytes) -> None:
    """Whether a RegisterNamespaceResponse says what was meant.

    Raises:
        BadReplyError: it is garbled.
        KVStoreConfigError: NAMESPACE_MISMATCH: client and server compute different digests.
    """
    try:
        reply = block_store_pb2.RegisterNamespaceResponse.FromString(reply_bytes)
    except DecodeError as error:
        raise BadReplyError(f"registration: {error}") from None
    if len(reply.namespace) != HASH_BYTES:
        raise BadReplyError(f"registration: the namespace's digest has {len(reply.namespace)} bytes")
    if reply.namespace != digest:
        raise KVStoreConfigError(
            "NAMESPACE_MISMATCH",
            f"the server computes the digest {reply.namespace.hex()} of the spec, the client {digest.hex()}: "
            "their versions do not fit",
        )


def match(reply_bytes: bytes, asked_blocks: int, block_tokens: int) -> MatchResult:
    """The result that a MatchPrefixResponse says. Raises: BadReplyError: more than was asked for, or a plan that does not fit."""
    try:
        reply = block_store_pb2.MatchPrefixResponse.FromString(reply_bytes)
    except DecodeError as error:
        raise BadReplyError(f"match: {error}") from None
    if reply.hit_length_blocks > asked_blocks:
        raise BadReplyError(f"match: {reply.hit_length_blocks} blocks hit, but {asked_blocks} were asked for")
    if not reply.hit_length_blocks:
        return MatchResult()
    return MatchResult(reply.hit_length_blocks, reply.lease, _plan(reply.plan, reply.hit_length_blocks * block_tokens))


def put_results(reply_bytes: bytes) -> PutReplies:
    """What a PutBlocksResponse says. Raises: BadReplyError."""
    try:
        return list(block_store_pb2.PutBlocksResponse.FromString(reply_bytes).results)
    except DecodeError as error:
        raise BadReplyError(f"put: {error}") from None


def put_state_results(reply_bytes: bytes) -> PutReplies:
    """What a PutStateResponse says: one result, or none. Raises: BadReplyError."""
    try:
        reply = block_store_pb2.PutStateResponse.FromString(reply_bytes)
    except DecodeError as error:
        raise BadReplyError(f"put_state: {error}") from None
    return [reply.result] if reply.HasField("result") else []


def put_report(outcome: PutReplies | Failure, first_block: int, block_count: int) -> PutReport:
    """One result per block put, in order, whatever the reply holds. Without a clear confirmation a block counts as rejected."""
    positions = range(first_block, first_block + block_count)
    if isinstance(outcome, Failure):
        rejected = [PutResult(block, PutStatus.REJECTED, outcome.reason, outcome.detail) for block in positions]
        return PutReport(rejected, outcome)
    replies: dict[int, types_pb2.PutResult] = {}
    unclear = set()
    for reply in outcome:
        if reply.block in replies:
            unclear.add(reply.block)
        replies[reply.block] = reply
    return PutReport([_put_result(block, None if block in unclear else replies.get(block)) for block in positions])


def delete(reply_bytes: bytes, asked_blocks: int) -> int:
    """The number that a DeleteBlocksResponse says. Raises: BadReplyError."""
    try:
        deleted = block_store_pb2.DeleteBlocksResponse.FromString(reply_bytes).deleted_blocks
    except DecodeError as error:
        raise BadReplyError(f"delete: {error}") from None
    if deleted > asked_blocks:
        raise BadReplyError(f"delete: {deleted} blocks deleted of {asked_blocks}")
    return deleted


def _plan(plan: types_pb2.ResumePlan, hit_tokens: int) -> ResumePlan:
    try:
        mode = ReplayMode(plan.mode)
    except ValueError:
        raise BadReplyError(f"match: replay mode {plan.mode} is unknown") from None
    if plan.hit_tokens != hit_tokens or plan.replay_start_token > hit_tokens:
        raise BadReplyError(
            f"match: a plan for {plan.hit_tokens} tokens from {plan.replay_start_token} on, but {hit_tokens} are hit"
        )
    return ResumePlan(plan.hit_tokens, plan.replay_start_token, mode)


def _put_result(block: int, reply: types_pb2.PutResult | None) -> PutResult:
    if reply is None:
        return PutResult(block, PutStatus.REJECTED, NO_RESULT, "the reply has no result, or several, for this block")
    try:
        status = PutStatus(reply.status)
    except ValueError:
        return PutResult(block, PutStatus.REJECTED, NO_RESULT, f"the reply has the unknown status {reply.status}")
    if status is PutStatus.REJECTED:
        return PutResult(block, status, clean_reason(reply.reason, "REJECTED"), reply.detail)
    return PutResult(block, status)
