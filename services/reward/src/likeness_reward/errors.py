"""The one family of errors: each has a gRPC code, a reason for programs, a message for people, and metadata.

On the wire an error is a google.rpc.Status whose details hold a google.rpc.ErrorInfo (reason, domain, metadata), a
BadRequest when a field of the request is to blame, and a RetryInfo when the same call may succeed later. The client
turns it back into the class of the same reason.
"""

from typing import Any, ClassVar

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

ERROR_DOMAIN = "likeness.reward"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
RETRY_AFTER_S = 1.0


class LikenessError(Exception):
    """Base of the family; also stands for an error whose reason this version does not know."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL_ERROR"
    by_reason: ClassVar[dict[str, type["LikenessError"]]] = {}

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}
        self.retry_after_s: float | None = None
        """What the server asks to wait for before the same call is tried again, seconds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        LikenessError.by_reason[cls.reason] = cls

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later, unchanged."""
        return self.code == grpc.StatusCode.UNAVAILABLE or isinstance(self, ServerBusy)


class InvalidRequest(LikenessError):
    """A request that can never be answered as it is."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"


class DeadlineRequired(LikenessError):
    """A call without a deadline."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "DEADLINE_REQUIRED"


class InvalidImage(LikenessError):
    """An image or frame that cannot be decoded, is empty, or has the wrong size."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_IMAGE"


class InvalidVideo(LikenessError):
    """Frames that do not fit what the video announced."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VIDEO"


class InvalidTemplate(LikenessError):
    """An identity template that is missing, damaged or of another length than the recognizer's embeddings."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TEMPLATE"


class NoFaceInImages(LikenessError):
    """No reference image has a usable face, so there is no identity."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "NO_FACE_IN_IMAGES"


class StreamOrderBroken(LikenessError):
    """A message that is not allowed at this point of a stream."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "STREAM_ORDER_BROKEN"


class LimitExceeded(LikenessError):
    """More than the server's limits allow; told before any memory is spent on it."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED"


class FingerprintMismatch(LikenessError):
    """A template or an expectation that belongs to other models."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH"


class FeatureUnavailable(LikenessError):
    """An optional feature that this server does not have."""

    code, reason = grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNAVAILABLE"


class Unauthenticated(LikenessError):
    """No bearer token, or the wrong one."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class ServerBusy(LikenessError):
    """As many calls as the server admits are running; try again a little later."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER_BUSY"


class ServerDraining(LikenessError):
    """The server is shutting down; another replica answers."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING"


class ServerUnavailable(LikenessError):
    """No server answers at the endpoint."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "SERVER_UNAVAILABLE"


class DeadlineExceeded(LikenessError):
    """The deadline passed before the answer."""

    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class InferenceFailed(LikenessError):
    """A network failed or gave numbers that are not finite. Never turned into a reward."""

    code, reason = grpc.StatusCode.INTERNAL, "INFERENCE_FAILED"


class InvalidGradients(LikenessError):
    """Gradients of a wrong shape, that are not finite, or that do not cover the frames with a face. Never applied."""

    code, reason = grpc.StatusCode.INTERNAL, "INVALID_GRADIENTS"


class InvalidPack(LikenessError):
    """A folder that is no usable pack of models: a missing file, a wrong tensor shape, ..."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "INVALID_PACK"


class ProviderUnavailable(LikenessError):
    """The execution provider asked for is not the one in use."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "PROVIDER_UNAVAILABLE"


class InvalidRepository(LikenessError):
    """A Triton model repository that cannot be written, or models on Triton that are not this service's."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "INVALID_REPOSITORY"


class InferenceServerUnavailable(LikenessError):
    """Triton does not answer, has not loaded the models or does not finish in time."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "INFERENCE_SERVER_UNAVAILABLE"


class CannotListen(LikenessError):
    """The address to serve on is taken or not ours."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "CANNOT_LISTEN"


class InvalidCredentials(LikenessError):
    """A key, certificate or token file that is missing or damaged."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "INVALID_CREDENTIALS"


class MissingExtra(LikenessError):
    """A part of the package that needs an extra which is not installed."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "MISSING_EXTRA"


class UnreadableVideo(LikenessError):
    """A local file that cannot be read as a video or image."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "UNREADABLE_VIDEO"


def status_from_error(error: LikenessError) -> Status:
    """Returns the google.rpc.Status of an error: its ErrorInfo, and BadRequest and RetryInfo where they apply."""
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)]
    if "field" in error.metadata:
        violation = BadRequest.FieldViolation(field=error.metadata["field"], description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if error.retryable:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(int(RETRY_AFTER_S * 1e9))
        details.append(retry)
    status = Status(code=error.code.value[0], message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_from_status(status: Status) -> LikenessError:
    """Returns the LikenessError that a google.rpc.Status stands for."""
    info, retry = ErrorInfo(), RetryInfo()
    for detail in status.details:
        if detail.Is(ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
    error = LikenessError.by_reason.get(info.reason, LikenessError)(status.message, **dict(info.metadata))
    if retry.HasField("retry_delay"):
        error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    for code in grpc.StatusCode:
        if code.value[0] == status.code:
            error.code = code
    return error


_WITHOUT_DETAILS: dict[grpc.StatusCode, type[LikenessError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.UNIMPLEMENTED: FeatureUnavailable,
}


def error_from_call(call: Any, endpoint: str) -> LikenessError:
    """Returns the LikenessError of a finished grpc call (a grpc.RpcError); `endpoint` is named in the message."""
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            return error_from_status(Status.FromString(value))
    code, details = call.code(), call.details()
    error = _WITHOUT_DETAILS.get(code, LikenessError)(
        f"reward server {endpoint}: {code.name}: {details}", endpoint=endpoint
    )
    error.code = code
    return error
