"""Events of the group."""

import dataclasses
import inspect
import pickle
import typing

from raysgd.elastic.events import Event, EventKind


def test_an_event_can_be_pickled_compared_and_put_into_sets():
    event = Event(kind="grown", generation=2, ranks=(1,), nodes=("a",), num_workers=3)
    again = pickle.loads(pickle.dumps(event))
    assert again == event
    assert len({event, again, dataclasses.replace(event, generation=3)}) == 2


def test_every_kind_of_event_is_documented():
    source = inspect.getsource(Event)
    assert [kind for kind in typing.get_args(EventKind) if f"``{kind}``" not in source] == []
