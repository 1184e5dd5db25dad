"""Training functions through losses and errors: never an older checkpoint, never a hang."""

import json
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from raysgd import ElasticConfig, train
from raysgd.errors import InsufficientResourcesError, RemoteTraceback
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import Backend, BackendConfig, TrainBackendError
from tests.conftest import SOON_S, own_memory, restart_when_created, wait_until

BACKOFF = ElasticConfig(initial_s=0.2, max_s=1.0, resize_cooldown_s=0.1)


@pytest.fixture
def make_trainer(ray_cluster, tmp_path):
    made = []

    def make(backend=None, num_workers=2, **arguments):
        trainer = Trainer(
            backend or BackendConfig(), num_workers, logdir=tmp_path / "runs", **arguments
        )
        made.append(trainer)
        trainer.start()
        return trainer

    yield make
    for trainer in made:
        trainer.shutdown()


def returns_early():
    if train.world_rank() == 0:
        return
    dist.all_reduce(torch.ones(1))


def raises_while_the_other_waits():
    if train.world_rank() == 0:
        raise KeyError("bad batch")
    dist.all_reduce(torch.ones(1))


def reports_less():
    for n in range(10):
        dist.all_reduce(torch.ones(1))
        if train.world_rank() == 1 or n % 2:
            train.report(n=n)


def saves_less():
    for n in range(10):
        dist.all_reduce(torch.ones(1))
        if train.world_rank() == 1 or n % 2:
            train.save_checkpoint(n=n)


def reports_after_the_end():
    dist.all_reduce(torch.ones(1))
    if train.world_rank() == 1:
        train.report(n=1)


def saves_where_the_other_reports():
    dist.all_reduce(torch.ones(1))
    (train.save_checkpoint if train.world_rank() else train.report)(n=1)


OUT_OF_STEP = [
    (returns_early, RuntimeError, "Workers 1 wait in a collective"),
    (raises_while_the_other_waits, KeyError, "bad batch"),
    (reports_less, RuntimeError, "equally often"),
    (saves_less, RuntimeError, "equally often"),
    (reports_after_the_end, RuntimeError, "worker 0 returned from the function"),
    (saves_where_the_other_reports, RuntimeError, "worker 1 saved a checkpoint"),
]


def test_workers_out_of_step_are_a_clear_error_soon(make_trainer):
    trainer = make_trainer("torch")
    trainer.run(lambda: dist.all_reduce(torch.ones(1)))  # whatever starts late has started
    for function, kind, said in OUT_OF_STEP:
        began = time.monotonic()
        with pytest.raises(kind, match=said):
            trainer.run(function)
        assert time.monotonic() - began < SOON_S, function.__name__
        # and the trainer can be used on, process group and all
        assert trainer.run(lambda: dist.all_reduce(torch.ones(1)) or train.world_rank()) == [0, 1]


def test_a_slow_worker_holds_the_others_in_step_and_is_no_error(make_trainer, tmp_path):
    """Rank 1 could be done long before rank 0 has reported once."""
    mark = tmp_path / "go"

    def function():
        told = []
        for n in range(5):
            if train.world_rank() == 0 and n == 1:
                wait_until(mark.exists, 60)
            train.report(n=n)
            told.append(time.time())
        return told

    trainer = make_trainer()
    iterator = trainer.run_iterator(function)
    next(iterator)
    released = time.time()
    mark.touch()
    assert len(list(iterator)) == 4
    _, fast = iterator.get_final_results()
    # one report is taken and one lies in the queue: the third has to wait for rank 0
    assert fast[3] > released


def test_the_error_is_the_users_own_with_the_workers_traceback(make_trainer):
    def function():
        raise ValueError("wrong shape")

    trainer = make_trainer()
    with pytest.raises(ValueError, match="wrong shape") as raised:
        trainer.run(function)
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "in function" in raised.value.__cause__.text
    assert not [e for e in trainer.events if e.kind == "lost"]


def test_a_function_that_never_comes_back_is_killed_before_the_next_run(make_trainer):
    def function():
        if train.world_rank() == 0:
            raise ValueError("over")
        while True:
            time.sleep(0.01)

    trainer = make_trainer()
    began = time.monotonic()
    with pytest.raises(ValueError, match="over"):
        trainer.run(function)
    assert time.monotonic() - began < SOON_S
    assert trainer.run(train.world_size) == [2, 2]


def reports_for_long():
    for n in range(1000):
        train.report(n=n)


class Raising(TrainingCallback):
    def __init__(self, error):
        self._error = error

    def handle_result(self, results, **info):
        raise self._error


class Undecodable(Backend):
    @staticmethod
    def decode_data(data_dict):
        raise ValueError("not decoded")


class UndecodableConfig(BackendConfig):
    backend_cls = Undecodable


def test_a_run_that_breaks_off_on_the_driver_leaves_a_trainer_that_can_be_used(make_trainer):
    trainer = make_trainer()
    for error in (ValueError("callback"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            trainer.run(reports_for_long, callbacks=[Raising(error)])
        assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(TypeError, match="must be a Ray Dataset"):
        trainer.run(reports_for_long, dataset=[1, 2, 3])
    next(trainer.run_iterator(reports_for_long))  # and dropped
    assert trainer.run(train.world_size) == [2, 2]
    kept = trainer.run_iterator(reports_for_long)
    next(kept)
    assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(RuntimeError, match="another was started"):
        next(kept)
    assert not [e for e in trainer.events if e.kind == "lost"]
    undecoded = make_trainer(UndecodableConfig())
    with pytest.raises(ValueError, match="not decoded"):
        undecoded.run(reports_for_long)
    assert undecoded.run(train.world_size) == [2, 2]


def test_a_run_that_another_thread_goes_through_is_not_ended_by_the_next(make_trainer):
    trainer = make_trainer()
    iterator = trainer.run_iterator(reports_for_long)
    begun, over, seen = threading.Event(), threading.Event(), []

    def go_through():
        seen.append(next(iterator))
        begun.set()
        over.wait()
        seen.append(next(iterator))

    thread = threading.Thread(target=go_through)
    thread.start()
    assert begun.wait(60)
    try:
        with pytest.raises(
            TrainBackendError, match=r"Trainer.run\(\) .* another thread .*get_final_results"
        ):
            trainer.run(train.world_size)
    finally:
        over.set()
        thread.join()
    assert [reports[0]["n"] for reports in seen] == [0, 1]


class Killed:
    """A run in which workers kill themselves, and a file a rank with what it has been through."""

    def __init__(self, folder, deaths):
        self.folder = str(folder)
        self.deaths = deaths
        """(life, rank, step): when a worker dies, just after its save has returned."""

    def __call__(self):
        state = train.load_checkpoint() or {"step": 0, "life": 0}
        rank = train.world_rank()
        life = len([n for n in os.listdir(self.folder) if n.startswith(f"start-{rank}-")])
        path = os.path.join(self.folder, f"start-{rank}-{life}.json")
        with open(path, "w") as file:
            json.dump({"step": state["step"]}, file)
        for step in range(state["step"] + 1, 21):
            train.report(step=step)
            train.save_checkpoint(step=step)
            with open(os.path.join(self.folder, f"saved-{rank}"), "w") as file:
                file.write(str(step))
            if (life, rank, step) in self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)
        return state["step"], train.world_size()


def started_from(folder, rank):
    names = sorted(n for n in os.listdir(folder) if n.startswith(f"start-{rank}-"))
    return [json.loads((folder / name).read_text())["step"] for name in names]


def test_a_function_resumes_from_the_last_checkpoint_that_was_saved(make_trainer, tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    trainer = make_trainer(max_retries=3, elastic=BACKOFF)
    deaths = {(0, 0, 3), (1, 1, 9), (2, 0, 10)}
    results = trainer.run(Killed(folder, deaths))
    assert results[0][0] >= 10
    starts = started_from(folder, 0)
    # the other worker may have gone on to the next save, which then is the one to resume from
    for start, saved in zip(starts[1:], (3, 9, 10), strict=True):
        assert saved <= start <= saved + 1
    assert [e.kind for e in trainer.events if e.kind != "waiting"] == [
        "started",
        *["lost", "restarted"] * 3,
    ]


def test_losses_beyond_max_retries_are_an_error_with_every_cause(make_trainer, tmp_path):
    (tmp_path / "marks").mkdir()
    trainer = make_trainer(max_retries=1, elastic=BACKOFF)
    deaths = {(0, 1, 1), (1, 1, 3), (2, 1, 5)}
    with pytest.raises(RuntimeError, match="max_retries=1") as raised:
        trainer.run(Killed(tmp_path / "marks", deaths))
    assert str(raised.value).count("worker 1 on node") == 2
    assert trainer.latest_checkpoint["step"] >= 3


def test_fewer_workers_go_on_where_no_more_fit(make_trainer, ray_cluster, tmp_path, monkeypatch):
    """The place of the worker that dies is taken before it can come back."""
    from ray.util import placement_group, remove_placement_group

    mark = tmp_path / "die"

    def function():
        state = train.load_checkpoint() or {"step": 0, "sizes": []}
        step, sizes = state["step"], state["sizes"]
        while len(sizes) < 2 and step < 5000:
            step += 1
            if train.world_rank() == 3 and mark.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            sizes = sizes if train.world_size() in sizes else [*sizes, train.world_size()]
            train.save_checkpoint(step=step, sizes=sizes)
            train.report(step=step)
        return sizes

    trainer = make_trainer(num_workers=(1, 4), elastic=BACKOFF)
    iterator = trainer.run_iterator(function)
    next(iterator)
    waiting = placement_group([{"CPU": 2}])
    restart_when_created(monkeypatch, trainer._executor._supervisor, waiting)
    mark.touch()
    try:
        for _ in iterator:
            pass
        sizes = iterator.get_final_results()[0]
        assert sizes[0] == 4
        assert sizes[1] < 4
    finally:
        remove_placement_group(waiting)


def test_a_trainer_made_on_a_worker_takes_room_beside_it_or_is_refused_at_once(
    make_trainer, tmp_path
):
    def function():
        def sizes(num_workers):
            folder = tmp_path / f"inner-{train.world_rank()}-{num_workers}"
            inner = Trainer(BackendConfig(), num_workers, logdir=folder)
            inner.start()
            try:
                return inner.run(train.world_size)
            finally:
                inner.shutdown()

        began = time.monotonic()
        with pytest.raises(InsufficientResourcesError) as refused:
            sizes(3)
        return str(refused.value), time.monotonic() - began, sizes(1), train.world_size()

    for said, waited_s, inner, outer in make_trainer().run(function):
        assert "on one of which this trainer is made hold 2 CPU" in said
        assert waited_s < SOON_S
        assert (inner, outer) == ([1], 2)


def test_a_function_that_reports_much_leaves_memory_as_it_is(make_trainer):
    def function(num_reports):
        before = 0
        for n in range(num_reports):
            if n == num_reports // 5:
                before = own_memory()
            train.report(n=n, text="x" * 4000)
        return own_memory() - before

    trainer = make_trainer()
    iterator = trainer.run_iterator(function, 2500)
    before = 0
    for n, _ in enumerate(iterator):
        if n == 500:
            before = own_memory()
    grown = [own_memory() - before, *iterator.get_final_results()]
    # 2000 reports of four kilobytes would be 8 MB and more if they were kept
    assert max(grown) < 6e6, grown
