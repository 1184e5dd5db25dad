"""Transitions of the state machine, compared with the docs and in random sequences."""

import contextlib
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from raysgd.elastic import state_machine
from raysgd.elastic.policies import Policy
from raysgd.elastic.state_machine import Action, Broken, CallBudget, Ready, Running, Starting
from raysgd.errors import CollectiveError

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
MAX_EARLY_FAILURES = 2
POLICIES = [
    Policy(
        process_can_rejoin=rejoins,
        supports_live_join=can_join,
        max_early_failures=MAX_EARLY_FAILURES,
        may_grow=may_grow,
        keeps_snapshots=keeps_snapshots,
    )
    for rejoins, can_join, may_grow, keeps_snapshots in product([True, False], repeat=4)
]
BUDGETS = [CallBudget(in_call=True, max_failures=number) for number in (0, 1, 3)]

LOST = {"worker": OSError("lost")}
BROKEN_LINK = CollectiveError("closed by peer")
booleans = st.booleans()
group_checked = st.builds(
    state_machine.GroupChecked,
    num_workers=st.integers(0, 3),
    num_joining=st.integers(0, 2),
    num_leaving=st.integers(0, 1),
    must_replay=booleans,
)
lost, formed = st.just(state_machine.WorkersLost(lost=LOST)), st.just(state_machine.GroupFormed())
state_lost = st.just(state_machine.StateLost(why="no shares"))
errors = st.sampled_from([None, BROKEN_LINK, ValueError("a mistake of the user")])
failed = st.builds(state_machine.FormingFailed, error=errors)
returned = st.builds(state_machine.CallReturned, is_complete=booleans)
stopped = st.builds(state_machine.CallFailed, error=errors)
calls = st.builds(state_machine.CallRequested, budget=st.sampled_from(BUDGETS))
starts = st.builds(state_machine.StartRequested, min_workers=st.integers(1, 3))
aborted = st.builds(state_machine.Aborted, reached_workers=booleans)
checked = st.builds(state_machine.SnapshotChecked, can_restart=booleans)
stops = st.just(state_machine.StopRequested())
RESULTS = {
    Action.CHECK_GROUP: group_checked,
    Action.REJOIN: formed | failed | lost | state_lost,
    Action.RESTART: formed,
    Action.CHECK_SNAPSHOT: checked,
    **dict.fromkeys((Action.RUN_CALL, Action.REPLAY), lost | returned | stopped),
}
"""Strategies for the next event, by last action."""


def key(action):
    return action if isinstance(action, Action) else type(action)


STATES = [
    *(Starting(), Starting(BUDGETS[0]), Ready(), Running(), Broken(), Broken(BUDGETS[0])),
    *(Broken(num_failed_rejoins=2), Ready(CallBudget(min_workers=4))),
]
SAMPLES = [
    *(
        state_machine.StartRequested(min_workers=1),
        state_machine.CallRequested(budget=BUDGETS[0]),
        state_machine.StopRequested(),
        state_machine.GroupChecked(num_workers=0),
    ),
    *(state_machine.SnapshotChecked(can_restart=each) for each in (True, False)),
    *(state_machine.GroupChecked(num_workers=2, num_joining=1, num_leaving=n) for n in (0, 1, 2)),
    state_machine.GroupChecked(num_workers=2),
    *(state_machine.FormingFailed(error=each) for each in (None, BROKEN_LINK)),
    *(state_machine.GroupFormed(), state_machine.WorkersLost(lost=LOST)),
    state_machine.StateLost(why="no shares"),
    state_machine.CallReturned(is_complete=True),
    *(state_machine.CallFailed(error=each) for each in (None, BROKEN_LINK)),
    *(state_machine.Aborted(reached_workers=each) for each in (True, False)),
]


def edges():
    """Return all transitions as names of (state, event, next state)."""
    found = set()
    for state, event, policy in product(STATES, SAMPLES, POLICIES):
        with contextlib.suppress(ValueError):  # the event cannot happen in the state
            after, _ = state_machine.transition(state, event, policy)
            found.add(tuple(type(each).__name__ for each in (state, event, after)))
    return found


def test_the_table_of_the_architecture_page_has_the_transitions():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \| (`.*`) \|", text, re.MULTILINE)
    names = r"`(\w+)`"
    drawn = {
        (state, event, after)
        for state, events, afters in rows
        for event, after in product(re.findall(names, events), re.findall(names, afters))
    }
    assert drawn == edges()
    assert {type(sample) for sample in SAMPLES} == set(state_machine.GroupEvent.__subclasses__())


@st.composite
def lives(draw):
    """Draw the start and some calls of a group, as (state, event, next state, actions)."""
    policy, state, event = draw(st.sampled_from(POLICIES)), Broken(), draw(starts)
    steps = []
    for _ in range(draw(st.integers(1, 60))):
        after, actions = state_machine.transition(state, event, policy)
        steps.append((state, event, after, actions))
        state = after
        last = key(actions[-1]) if actions else None
        if draw(st.integers(0, 30)) == 0:
            event = draw(aborted | stops)
        elif last in RESULTS:
            event = draw(RESULTS[last])
        elif isinstance(state, Running | Starting):
            event = draw(aborted)  # an action has raised
        else:
            event = draw(calls | starts)
    return steps


@given(lives())
def test_the_table_has_each_transition_of_random_sequences(steps):
    assert {tuple(type(each).__name__ for each in step[:3]) for step in steps} <= edges()


@given(lives())
def test_a_call_costs_no_more_than_its_budget(steps):
    for state, _, after, actions in steps:
        budget, is_over = after.budget, any(key(action) is state_machine.Fail for action in actions)
        is_over = is_over or budget == state.budget  # an earlier step may have ended the call
        assert is_over or budget.num_failures <= budget.max_failures
        assert is_over or budget.num_early_failures <= MAX_EARLY_FAILURES


@given(lives())
def test_a_call_runs_only_on_a_group_that_is_ready(steps):
    for state, event, after, actions in steps:
        runs = Action.RUN_CALL in actions or Action.REPLAY in actions
        if runs:
            assert isinstance(state, Ready)
            assert event.num_workers >= state.budget.min_workers
        assert not runs or isinstance(after, Running)


def test_a_loss_in_a_replay_is_a_retry_if_the_call_has_begun():
    replay = state_machine.GroupChecked(num_workers=2, must_replay=True)
    for has_begun in (True, False):
        state = Ready(replace(BUDGETS[1], has_begun=has_begun))
        for event in (replay, state_machine.WorkersLost(lost=LOST)):
            state, _ = state_machine.transition(state, event, POLICIES[0])
        num_counted = state.budget.num_failures, state.budget.num_early_failures
        assert num_counted == (has_begun, not has_begun)


def test_the_third_failure_to_form_a_live_group_is_an_error():
    state, event = Broken(), state_machine.FormingFailed(error=BROKEN_LINK)
    for _ in range(2):
        state, actions = state_machine.transition(state, event, POLICIES[0])
        assert actions == (Action.CHECK_GROUP,)
    assert state_machine.transition(state, event, POLICIES[0])[1] == ()
