"""What trainers share: calls, state, files and shutdown, with one worker in this process."""

import gc
import weakref

import pytest
import torch

from raysgd.errors import CheckpointError
from tests.operators import Classifier, make_model, parameters
from tests.unit.recorder import Recorder


def state_of(trainer):
    return trainer.get_local_operator().model.state_dict()


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


# ---- results


def test_metrics_have_the_names_that_users_know(make_trainer):
    trainer = make_trainer()
    assert set(trainer.train()) == {
        "epoch",
        "num_samples",
        "batch_count",
        "train_loss",
        "last_train_loss",
    }
    assert set(trainer.validate()) == {
        "num_samples",
        "batch_count",
        "val_loss",
        "last_val_loss",
        "val_accuracy",
        "last_val_accuracy",
    }


def test_results_can_be_had_by_worker(make_trainer):
    trainer = make_trainer()
    (trained,) = trainer.train(reduce_results=False)
    assert (trained["epoch"], trained["num_samples"]) == (1, 40)
    (validated,) = trainer.validate(reduce_results=False)
    assert validated["num_samples"] == 40


def test_the_newest_metrics_of_train_and_validate_are_kept(make_trainer):
    trainer = make_trainer()
    assert trainer.latest_metrics == {}
    trained = trainer.train()
    validated = trainer.validate()
    latest = trainer.latest_metrics
    assert latest["train_loss"] == trained["train_loss"]
    assert latest["val_loss"] == validated["val_loss"]
    assert latest["epoch"] == 1
    latest.clear()
    assert trainer.latest_metrics


def test_every_key_of_a_batch_becomes_a_mean_and_a_last_value(make_trainer):
    class Telling(Recorder):
        def train_batch(self, batch, batch_info):
            return {"k": float(batch[0][0]), "note": "x", "num_samples": len(batch[0])}

    result = make_trainer(Telling).train()
    assert (result["k"], result["last_k"]) == (16.0, 32.0)
    assert (result["note"], result["last_note"]) == ("x", "x")


def test_the_trainer_knows_how_far_it_is(make_trainer):
    trainer = make_trainer()
    assert (trainer.epoch, trainer.global_step) == (0, 0)
    trainer.train(num_steps=2)
    assert (trainer.epoch, trainer.global_step) == (1, 2)
    trainer.train()
    assert (trainer.epoch, trainer.global_step) == (1, 5)


def test_the_trainer_knows_how_far_it_is_after_an_error(make_trainer):
    trainer = make_trainer(Recorder)

    def fail(batch_info, when):
        if batch_info["global_step"] == 3:
            raise ValueError("bad batch")

    trainer.get_local_operator().fail = fail
    with pytest.raises(ValueError, match="bad batch"):
        trainer.train()
    assert (trainer.epoch, trainer.global_step) == (1, 3)
    assert trainer.events[-1].step == 3


def test_events_tell_what_happened(make_trainer):
    trainer = make_trainer(Recorder)

    def fail(batch_info, when):
        raise ValueError("bad batch")

    trainer.get_local_operator().fail = fail
    with pytest.raises(ValueError, match="bad batch"):
        trainer.train()
    trainer.get_local_operator().fail = lambda *arguments: None
    trainer.train()
    kinds = [event.kind for event in trainer.events]
    assert kinds == ["started", "user_error", "resumed"]
    assert "bad batch" in trainer.events[1].cause
    assert trainer.events[2].generation > trainer.events[0].generation
    trainer.events.clear()
    assert trainer.events


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_steps": 0}, ValueError, "num_steps=0"),
        ({"num_steps": -1}, ValueError, "num_steps=-1"),
        ({"num_steps": 1.5}, TypeError, "num_steps"),
        ({"num_steps": True}, TypeError, "num_steps"),
        ({"info": 3}, TypeError, "info"),
    ],
)
@pytest.mark.parametrize("method", ["train", "validate"])
def test_senseless_arguments_are_refused(make_trainer, method, arguments, error, message):
    trainer = make_trainer()
    with pytest.raises(error, match=message):
        getattr(trainer, method)(**arguments)
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_retries": -1}, ValueError),
        ({"max_retries": "3"}, TypeError),
        ({"dataset": [1]}, TypeError),
    ],
)
def test_senseless_arguments_of_train_are_refused(make_trainer, arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        make_trainer().train(**arguments)


# ---- functions on workers


@pytest.mark.parametrize("value", [7, None, b"bytes", b"", {"a": torch.ones(1)}, lambda: 1])
def test_what_a_function_returns_on_a_worker_comes_back(make_trainer, value):
    trainer = make_trainer()
    assert trainer.apply_all_workers(lambda: value) == [value]
    assert trainer.apply_all_operators(lambda operator: value) == [value]


def test_a_function_gets_the_operator(make_trainer):
    trainer = make_trainer()
    assert trainer.apply_all_operators(lambda o: o) == [trainer.get_local_operator()]


@pytest.mark.parametrize("method", ["apply_all_workers", "apply_all_operators"])
def test_what_cannot_be_called_is_refused(make_trainer, method):
    with pytest.raises(TypeError, match=rf"{method}\(\) takes a function"):
        getattr(make_trainer(), method)(7)


# ---- state


def test_save_and_load_go_on_with_the_next_unseen_sample(make_trainer, tmp_path):
    config = {"shuffle": True, "dropout": 0.5}
    trainer = make_trainer(Recorder, config)
    trainer.train(num_steps=7)
    path = trainer.save(tmp_path / "state.pt")
    assert path == str(tmp_path / "state.pt")
    seen = trainer.get_local_operator().trained
    trainer.train()

    other = make_trainer(Recorder, {**config, "seed": 9})
    other.load(path)
    assert (other.epoch, other.global_step) == (2, 7)
    result = other.train()
    assert (result["epoch"], result["num_samples"]) == (2, 24)
    assert seen[56:] == other.get_local_operator().trained
    assert equal(state_of(trainer), state_of(other))


SCHEDULERS = {
    "LambdaLR": lambda s, o: s.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda s, o: s.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda s, o: s.StepLR(o, 2),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda s, o: s.ConstantLR(o),
    "LinearLR": lambda s, o: s.LinearLR(o),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.9),
    "SequentialLR": lambda s, o: s.SequentialLR(
        o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda s, o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)]),
    "CyclicLR": lambda s, o: s.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda s, o: s.PolynomialLR(o),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_comes_back_from_a_file(make_trainer, tmp_path, name):
    def scheduler(optimizer):
        return SCHEDULERS[name](torch.optim.lr_scheduler, optimizer)

    arguments = {"config": {"scheduler": scheduler}, "scheduler_step_freq": "batch"}
    trainer, other = (make_trainer(Recorder, **arguments) for _ in range(2))
    trainer.train(num_steps=4)
    other.load(trainer.save(tmp_path / "state.pt"))
    for each in (trainer, other):
        each.train(num_steps=3)
    rates = [each.get_local_operator().optimizer.param_groups[0]["lr"] for each in (trainer, other)]
    assert rates[0] == rates[1]
    assert equal(state_of(trainer), state_of(other))


def test_a_state_is_apart_from_the_trainer(make_trainer):
    trainer = make_trainer()
    state = trainer.state_dict()
    weights = state["models"][0]["0.weight"].clone()
    trainer.train()
    assert torch.equal(state["models"][0]["0.weight"], weights)
    trainer.load_state_dict(state, blocking=True)
    assert torch.equal(state_of(trainer)["0.weight"], weights)
    trainer.train()
    assert torch.equal(state["models"][0]["0.weight"], weights)
    assert trainer.global_step == 5


def test_a_state_that_was_loaded_is_not_changed(make_trainer):
    trainer = make_trainer()
    state = trainer.state_dict()
    keys = set(state), set(state["data"])
    make_trainer().load_state_dict(state)
    assert (set(state), set(state["data"])) == keys


@pytest.mark.parametrize("state", [{}, {"models": []}, None, [1]])
def test_what_is_no_state_is_refused(make_trainer, state):
    with pytest.raises(CheckpointError, match="no state of a trainer"):
        make_trainer().load_state_dict(state)


class Wider(Classifier):
    def setup(self, config):
        model = torch.nn.Linear(8, 32)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )


class Pair(Classifier):
    def setup(self, config):
        models = [make_model(), make_model()]
        self.models, self.optimizers = self.register(
            models=models, optimizers=[torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        )
        self.model = models[0]


@pytest.mark.parametrize("other", [Wider, Pair])
def test_a_state_of_other_models_is_refused_and_changes_nothing(make_trainer, other):
    trainer = make_trainer()
    before = parameters(trainer.get_local_operator())
    with pytest.raises(CheckpointError):
        trainer.load_state_dict(make_trainer(other).state_dict())
    assert torch.equal(parameters(trainer.get_local_operator()), before)


def test_files_are_checked_before_the_state_is_made(make_trainer, tmp_path):
    made = []

    class Noting(Recorder):
        def state_dict(self):
            made.append(1)
            return {}

    trainer = make_trainer(Noting)
    with pytest.raises(CheckpointError, match="does not exist"):
        trainer.save(tmp_path / "missing" / "state.pt")
    assert not made
    with pytest.raises(CheckpointError, match="no such file"):
        trainer.load(tmp_path / "state.pt")


def test_a_refused_file_leaves_the_trainer_usable(make_trainer, tmp_path):
    trainer = make_trainer()
    (tmp_path / "state.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "state.pt")
    assert trainer.train()["num_samples"] == 40


# ---- the end


def test_after_shutdown_every_call_says_so(make_trainer, tmp_path):
    trainer = make_trainer()
    state = trainer.state_dict()
    trainer.shutdown()
    calls = [
        trainer.train,
        trainer.validate,
        trainer.state_dict,
        trainer.get_model,
        trainer.get_local_operator,
        lambda: trainer.load_state_dict(state),
        lambda: trainer.save(tmp_path / "state.pt"),
        lambda: trainer.load(tmp_path / "state.pt"),
        lambda: trainer.update_scheduler(1.0),
        lambda: trainer.apply_all_workers(int),
        lambda: trainer.apply_all_operators(id),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="TorchTrainer is shut down"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_shutting_down_twice_is_harmless(make_trainer, force):
    trainer = make_trainer()
    trainer.train()
    trainer.shutdown(force=force)
    trainer.shutdown(force=force)
    assert trainer.num_workers == 0
    assert (trainer.epoch, trainer.global_step) == (1, 5)


def test_a_with_block_ends_the_trainer_whatever_happens(make_trainer):
    with make_trainer() as trainer:
        trainer.train()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.train()
    with pytest.raises(KeyError), make_trainer() as trainer:
        raise KeyError
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.train()


def test_a_dropped_trainer_lets_go_of_its_operator(make_trainer):
    from raysgd import TorchTrainer

    trainer = TorchTrainer(
        training_operator_cls=Recorder,
        config={"num_samples": 8, "batch_size": 8},
        use_local=True,
        use_gpu=False,
    )
    trainer.train()
    operator = weakref.ref(trainer.get_local_operator())
    del trainer
    gc.collect()
    assert operator() is None
