"""What every call goes through: it needs a deadline and perhaps a token, and its LikenessError becomes a status."""

import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from likeness_reward.errors import (
    STATUS_DETAILS_KEY,
    DeadlineRequired,
    InferenceFailed,
    LikenessError,
    Unauthenticated,
    status_from_error,
)
from likeness_reward.inference.call import CURRENT_CALL, Call

SERVICE_PREFIX = "/likeness.reward.v1.RewardService/"
LONGEST_DEADLINE_S = 7 * 24 * 3600.0
logger = logging.getLogger(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of RewardService; others (health, reflection) pass untouched."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(SERVICE_PREFIX):
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._wrap_stream(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._wrap_unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _wrap_unary(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                self._check(context)
                begin_call(context)
                return await behaviour(request, context)
            except LikenessError as error:
                await abort(context, error)

        return call

    def _wrap_stream(self, behaviour: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                self._check(context)
                begin_call(context)
                async with contextlib.aclosing(behaviour(requests, context)) as responses:
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
        if self._token is not None:
            offered = dict(context.invocation_metadata() or ()).get("authorization", "")
            if not hmac.compare_digest(str(offered).encode(), f"Bearer {self._token}".encode()):
                raise Unauthenticated("the call carries no valid bearer token")


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
