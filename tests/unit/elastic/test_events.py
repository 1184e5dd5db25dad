"""What happened to the group, as an object that users keep."""

import dataclasses
import inspect
import pickle
import time
import typing

import pytest

from raysgd.elastic.events import Event, EventKind


def test_an_event_is_known_by_its_kind_its_generation_and_its_ranks():
    event = Event(kind="lost", generation=2, ranks=(1,))
    assert (event.kind, event.generation, event.ranks) == ("lost", 2, (1,))
    assert (event.nodes, event.cause, event.step, event.seconds) == ((), "", 0, 0.0)
    with pytest.raises(TypeError, match="positional"):
        Event("lost", 2, (1,))


def test_an_event_says_when_it_was_unless_it_is_told():
    before = time.time()
    now = Event(kind="lost", generation=1, ranks=()).time
    assert before <= now <= time.time()
    assert Event(kind="lost", generation=1, ranks=(), time=3.0).time == 3.0


def test_what_has_happened_does_not_change():
    event = Event(kind="lost", generation=2, ranks=(1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.cause = "another"


def test_an_event_can_be_sent_compared_and_put_into_sets():
    event = Event(kind="grown", generation=2, ranks=(1,), nodes=("a",), num_workers=3)
    again = pickle.loads(pickle.dumps(event))
    assert again == event
    assert len({event, again, dataclasses.replace(event, generation=3)}) == 2


def test_every_kind_is_explained():
    """In the words that the documentation shows."""
    source = inspect.getsource(Event)
    assert [kind for kind in typing.get_args(EventKind) if f"``{kind}``" not in source] == []
