"""Ctrl-C during a call: deferred in a step, and delivered everywhere else."""

import signal
import threading

import pytest

from raysgd.loop.loop_control import LoopControl


@pytest.fixture
def handled():
    """Return the numbers of the signals that user code has handled."""
    numbers = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_end_of_the_step_or_the_call(handled):
    own = LoopControl()
    with own.deferring_ctrl_c():
        own.raise_if_interrupted()
        press()
        assert handled == []
        own.raise_if_interrupted()
        assert handled == [signal.SIGINT]
        own.raise_if_interrupted()
        assert handled == [signal.SIGINT]
        press()  # in the last step
        assert handled == [signal.SIGINT]
    assert handled == [signal.SIGINT] * 2
    press()  # the handler of user code is back
    assert handled == [signal.SIGINT] * 3
    with own.deferring_ctrl_c():
        own.raise_if_interrupted()
    assert handled == [signal.SIGINT] * 3


def test_ctrl_c_between_steps_and_a_second_one_do_not_wait(handled):
    own = LoopControl()
    with own.deferring_ctrl_c():
        assert own.next_batch(iter(press, 0)) is None
        assert handled == [signal.SIGINT]
        press()
        assert handled == [signal.SIGINT]
        own.raise_if_interrupted()
    assert handled == [signal.SIGINT] * 2
    with own.deferring_ctrl_c():
        press()
        press()
        assert handled == [signal.SIGINT] * 3
    assert handled == [signal.SIGINT] * 3


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_ctrl_c_that_python_does_not_handle_is_left_alone(handled, handler):
    signal.signal(signal.SIGINT, handler)
    with LoopControl().deferring_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_call_in_another_thread_does_not_defer_ctrl_c(handled):
    done = []

    def call():
        with LoopControl().deferring_ctrl_c():
            done.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert done == [True]
