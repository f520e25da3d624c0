"""The call on whose behalf a thread works."""

import threading
import time

from likeness_reward.inference.call import CURRENT_CALL, MARGIN_S, Call, CallThreads


def test_a_margin_of_the_deadline_is_kept_for_the_way_back() -> None:
    assert 1.0 - MARGIN_S - 0.01 < Call(1.0).remaining_s <= 1.0 - MARGIN_S
    assert Call(MARGIN_S / 2).remaining_s == 0.0


def test_nothing_remains_once_the_call_has_ended() -> None:
    call = Call(60.0)
    call.end()
    assert call.remaining_s == 0.0


def test_the_end_reaches_those_that_watch_and_nobody_else() -> None:
    call, told = Call(60.0), []
    with call.watched(lambda: told.append("too early")):
        pass
    with call.watched(lambda: told.append("in time")):
        call.end()
    with call.watched(lambda: told.append("late, at once")):
        pass
    assert told == ["in time", "late, at once"]


def test_threads_work_for_the_call_that_handed_them_the_work() -> None:
    with CallThreads(1) as threads:
        assert threads.submit(CURRENT_CALL.get).result() is None
        call = Call(60.0)
        previous = CURRENT_CALL.set(call)
        try:
            assert threads.submit(CURRENT_CALL.get).result() is call
        finally:
            CURRENT_CALL.reset(previous)
        assert threads.submit(CURRENT_CALL.get).result() is None


def test_ends_from_many_threads_tell_each_watcher_once() -> None:
    call, told = Call(60.0), []
    with call.watched(lambda: told.append(time.monotonic())):
        enders = [threading.Thread(target=call.end) for _ in range(8)]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
    assert len(told) == 1
