"""What every call goes through: it needs a deadline and perhaps a token, its LikenessError becomes a status, its end is
counted and logged."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from likeness_reward.credentials import BearerTokens
from likeness_reward.errors import (
    STATUS_DETAILS_KEY,
    DeadlineRequired,
    InferenceFailed,
    InvalidRequest,
    LikenessError,
    status_from_error,
)
from likeness_reward.inference.call import CURRENT_CALL, Call
from likeness_reward.metrics import ServerMetrics

SERVICE_PREFIX = "/likeness.reward.v1.RewardService/"
LONGEST_DEADLINE_S = 7 * 24 * 3600.0
logger = logging.getLogger(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of RewardService; others (health, reflection) pass untouched."""

    def __init__(self, tokens: BearerTokens, metrics: ServerMetrics) -> None:
        self._tokens = tokens
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(SERVICE_PREFIX):
            return handler
        method = handler_call_details.method.removeprefix(SERVICE_PREFIX)
        # The messages are parsed here and not by gRPC, which would blame the server for bytes that are no message.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._wrap_stream(method, handler.stream_stream, handler.request_deserializer),
                None,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._wrap_unary(method, handler.unary_unary, handler.request_deserializer),
            None,
            handler.response_serializer,
        )

    def _wrap_unary(
        self, method: str, behaviour: Callable[..., Awaitable[Any]], parse: Callable[[bytes], Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            with self._recorded(method, context):
                try:
                    self._check(context)
                    begin_call(context)
                    return await behaviour(parsed(request, method, parse), context)
                except LikenessError as error:
                    await abort(context, error)

        return call

    def _wrap_stream(
        self, method: str, behaviour: Callable[..., AsyncGenerator[Any, None]], parse: Callable[[bytes], Any]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._recorded(method, context):
                try:
                    self._check(context)
                    begin_call(context)
                    messages = (parsed(request, method, parse) async for request in requests)
                    async with contextlib.aclosing(behaviour(messages, context)) as responses:
                        async for response in responses:
                            yield response
                except LikenessError as error:
                    await abort(context, error)

        return call

    def _check(self, context: grpc.aio.ServicerContext) -> None:
        """Raises DeadlineRequired or Unauthenticated."""
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > LONGEST_DEADLINE_S:
            raise DeadlineRequired("the call has no deadline; set a timeout of at most a week")
        self._tokens.check(str(dict(context.invocation_metadata() or ()).get("authorization", "")))

    @contextlib.contextmanager
    def _recorded(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts and logs a call when it ends, however it ends."""
        CURRENT_CALL.set(None)
        began = time.perf_counter()
        # A stream that its caller left is closed late, when gRPC has freed the call: asking for its peer then crashes.
        peer, remaining_s = context.peer(), context.time_remaining()
        finished = False
        try:
            yield
            finished = True
        finally:
            seconds = time.perf_counter() - began
            code = status_name(context, finished, seconds >= (remaining_s or 0.0))
            self._metrics.calls.labels(method, code).inc()
            self._metrics.call_seconds.labels(method).observe(seconds)
            log_call(method, code, seconds, peer)


def parsed(request: bytes, method: str, parse: Callable[[bytes], Any]) -> Any:
    """Returns the message that `parse` reads from bytes. Raises InvalidRequest."""
    try:
        return parse(request)
    except DecodeError as error:
        raise InvalidRequest(f"{method}: {len(request)} bytes that are no {method}Request") from error


def begin_call(context: grpc.aio.ServicerContext) -> None:
    """Lets everything that is done for this call know its deadline and its end."""
    call = Call(context.time_remaining())
    context.add_done_callback(lambda _: call.end())
    CURRENT_CALL.set(call)


async def abort(context: grpc.aio.ServicerContext, error: LikenessError) -> None:
    """Ends a call with the google.rpc.Status of an error."""
    if isinstance(error, InferenceFailed):
        logger.error("%s: %s", error.reason, error.message)
    details = status_from_error(error).SerializeToString()
    await context.abort(error.code, error.message, ((STATUS_DETAILS_KEY, details),))


def status_name(context: grpc.aio.ServicerContext, finished: bool, too_late: bool) -> str:
    """Returns the name of a call's status: the one it was aborted with, OK, or CANCELLED when the caller left."""
    number = context.code()
    for code in grpc.StatusCode:
        if number in (code, code.value[0]) and code != grpc.StatusCode.OK:
            return str(code.name)
    if finished:
        return "OK"
    return "DEADLINE_EXCEEDED" if too_late else "CANCELLED"


def log_call(method: str, code: str, seconds: float, peer: str) -> None:
    """Writes a call's line; in JSON its parts are fields."""
    call = CURRENT_CALL.get()
    fields: dict[str, object] = {"method": method, "code": code, "seconds": round(seconds, 4), "peer": peer}
    if call is not None:
        fields |= {"request_id": call.request_id, "videos": call.video_count, "frames": call.frame_count}
    level = logging.DEBUG if method == "GetServerInfo" and code == "OK" else logging.INFO  # probes ask all the time
    logger.log(level, "%s", " ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)
