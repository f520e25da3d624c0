"""The call on whose behalf a thread works: until when, and whether anybody still waits for the answer."""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MARGIN_S = 0.05
"""What a deadline that is handed on leaves for the way back."""


class Call:
    """A deadline, an end that other threads can wait for, and what the call's log line tells."""

    def __init__(self, timeout_s: float) -> None:
        self.request_id = ""
        self.video_count = 0
        self.frame_count = 0
        self._deadline = time.monotonic() + timeout_s - MARGIN_S
        self._lock = threading.Lock()
        self._ended = False
        self._watchers: dict[object, Callable[[], Any]] = {}

    @property
    def remaining_s(self) -> float:
        """Seconds until the answer is due; 0 once nobody waits for it any more."""
        return 0.0 if self._ended else max(0.0, self._deadline - time.monotonic())

    def end(self) -> None:
        """Tells everything that works for this call that nobody waits any more."""
        with self._lock:
            self._ended = True
            watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher()

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[], Any]) -> Iterator[None]:
        """Calls `watcher`, in another thread, if the call ends within this context; at once if it has ended."""
        key = object()
        with self._lock:
            ended = self._ended
            if not ended:
                self._watchers[key] = watcher
        if ended:
            watcher()
        try:
            yield
        finally:
            with self._lock:
                self._watchers.pop(key, None)


CURRENT_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("current_call", default=None)


class CallThreads(ThreadPoolExecutor):
    """Threads that work on behalf of the call that handed them the work."""

    def __init__(self, workers: int, depth_changed: Callable[[int], None] = lambda depth: None) -> None:
        """`depth_changed` is told how many pieces of work wait for a thread, whenever that changes."""
        super().__init__(workers, thread_name_prefix="inference")
        self._depth = 0
        self._depth_lock = threading.Lock()
        self._depth_changed = depth_changed

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedules fn in the context of the caller."""
        context = contextvars.copy_context()

        def run() -> T:
            self._change_depth(-1)
            return context.run(fn, *args, **kwargs)

        self._change_depth(+1)
        future = super().submit(run)
        future.add_done_callback(lambda done: self._change_depth(-1) if done.cancelled() else None)
        return future

    def _change_depth(self, change: int) -> None:
        with self._depth_lock:
            self._depth += change
            self._depth_changed(self._depth)
