"""Events of the group."""

import pickle
import typing
from pathlib import Path

from raysgd.elastic.events import Event, EventKind

PAGE = Path(__file__).parents[3] / "docs" / "elastic_reference.md"


def test_an_event_can_be_pickled_and_put_into_sets():
    event = Event(kind="grown", generation=2, ranks=(1,), node_ids=("a",), num_workers=3)
    assert {event} == {pickle.loads(pickle.dumps(event))}


def test_every_kind_of_event_is_documented():
    table = PAGE.read_text(encoding="utf-8")
    assert [kind for kind in typing.get_args(EventKind) if f"| `{kind}` |" not in table] == []
