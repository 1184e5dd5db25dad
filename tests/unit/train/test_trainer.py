"""Arguments of the trainers, functions and folders: all that needs no worker."""

import dataclasses
import functools
import threading

import pytest
import ray.train

from raysgd import ElasticConfig
from raysgd.train import (
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    Trainer,
    horovod,
    tensorflow,
    torch,
)
from raysgd.train import trainer as trainer_module
from raysgd.train.backend import BackendConfig
from raysgd.train.callbacks import PrintCallback
from raysgd.tune.functions import trainer_trainable


@pytest.fixture
def trainer(tmp_path):
    return Trainer(BackendConfig(), num_workers=2, logdir=tmp_path)


def test_before_a_run_there_is_nothing(trainer):
    assert trainer.latest_run_dir is None
    assert trainer.latest_checkpoint is None
    assert trainer.latest_checkpoint_dir is None
    assert trainer.latest_checkpoint_path is None
    assert trainer.best_checkpoint is None
    assert trainer.best_checkpoint_path is None


def test_a_trainer_shows_what_it_is(tmp_path):
    shown = repr(Trainer("torch", num_workers=(1, 2), logdir=tmp_path))
    assert shown == f"<Trainer('torch', num_workers=(1, 2)): not started, runs in {tmp_path}>"


def test_a_trainer_that_is_not_started_says_so(trainer):
    for call in (trainer.run, trainer.run_iterator):
        with pytest.raises(RuntimeError, match=r"Call start\(\)"):
            call(lambda: 1)
    trainer.shutdown()


@pytest.mark.parametrize("function", [lambda a, b: 1, 5, functools.partial(lambda a, b, c: 1, 1)])
def test_a_function_that_takes_more_than_the_config_is_an_error(trainer, function):
    with pytest.raises(ValueError, match="training function"):
        trainer.run(function)


def test_runs_are_kept_where_ray_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    by_date = Trainer(BackendConfig()).logdir
    assert by_date.parent == tmp_path / "ray_results"
    assert by_date.name.startswith("train_2")
    assert Trainer(BackendConfig(), logdir="mine").logdir == tmp_path / "ray_results" / "mine"
    assert Trainer(BackendConfig(), logdir=tmp_path / "own").logdir == tmp_path / "own"


def test_trainers_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(trainer_module, "run_folder", lambda *given: tmp_path / "train_now")
    assert [Trainer(BackendConfig()).logdir.name for _ in range(3)] == [
        "train_now",
        "train_now_002",
        "train_now_003",
    ]


def test_what_has_no_meaning_for_a_function_is_refused_or_left_out(tmp_path):
    with pytest.raises(ValueError, match=r"Pass num_workers=\(1, 4\)"):
        Trainer(BackendConfig(), 4, logdir=tmp_path, elastic=ElasticConfig(min_workers=1))
    # a run that keeps no snapshots of operators has its checkpoints all the same
    elastic = ElasticConfig(snapshot_every=None)
    trainer = Trainer(BackendConfig(), logdir=tmp_path, elastic=elastic)
    assert trainer._executor._elastic.snapshot_every is not None


def test_a_trainer_of_a_framework_has_its_backend_with_the_settings_that_are_given(monkeypatch):
    monkeypatch.setattr(tensorflow, "check_tensorflow", lambda asked_by: None)
    monkeypatch.setattr(horovod, "check_horovod", lambda: None)
    for trainer_cls, config_cls, name in (
        (torch.TorchTrainer, torch.TorchConfig, "torch_config"),
        (tensorflow.TensorflowTrainer, tensorflow.TensorflowConfig, "tensorflow_config"),
        (horovod.HorovodTrainer, horovod.HorovodConfig, "horovod_config"),
    ):
        assert isinstance(trainer_cls(lambda: 1).backend_config, config_cls)
        given = config_cls(timeout_s=7)
        trainer = trainer_cls(lambda config: 1, train_loop_config={"a": 1}, **{name: given})
        assert trainer.backend_config is given
        assert trainer.train_loop_config == {"a": 1}


def test_wrong_backends_are_errors(tmp_path):
    with pytest.raises(ValueError, match="tensorflow"):
        Trainer("jax", logdir=tmp_path)
    with pytest.raises(TypeError, match="backend"):
        Trainer(None, logdir=tmp_path)


def test_a_callback_that_is_none_is_an_error(trainer):
    with pytest.raises(TypeError, match="TrainingCallback"):
        trainer.run(lambda: 1, callbacks=[print])


def test_wrong_arguments_of_fit_are_errors_before_anything_starts():
    for arguments, said in (
        ({"scaling_config": ScalingConfig(num_workers=0)}, "num_workers"),
        ({"scaling_config": {"num_workers": 1, "resources_per_worker": {"GPU": 1}}}, "use_gpu"),
        *(
            ({"run_config": RunConfig(name=name)}, "must be the name of one folder")
            for name in ("a/b", "", "..", 5)
        ),
        ({"run_config": RunConfig(storage_path="s3://bucket/a")}, "not a URL.*CheckpointStore"),
        (
            {"run_config": RunConfig(failure_config=FailureConfig(-2))},
            r"FailureConfig\(max_failures=-2\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            DataParallelTrainer(lambda: 1, **arguments)
    with pytest.raises(ValueError, match="training function"):
        DataParallelTrainer(lambda a, b: 1)
    for arguments, said in WRONG_KINDS:
        with pytest.raises(TypeError, match=said):
            DataParallelTrainer(lambda: 1, **arguments)


WRONG_KINDS = [
    ({"run_config": {"name": "mine"}}, "run_config={'name': 'mine'}: must be a RunConfig"),
    ({"run_config": RunConfig(failure_config={"max_failures": 1})}, "must be a FailureConfig"),
    ({"run_config": RunConfig(checkpoint_config=2)}, "must be a CheckpointConfig"),
    ({"run_config": RunConfig(callbacks=PrintCallback())}, "must be a list"),
    ({"run_config": RunConfig(callbacks=[print])}, "each must be a TrainingCallback"),
    ({"scaling_config": 2}, "scaling_config=2: must be a ScalingConfig"),
    ({"scaling_config": {"resources_per_worker": ["CPU"]}}, r"\['CPU'\]: must be a dict"),
    ({"scaling_config": {"use_gpu": "auto"}}, "use_gpu='auto': must be True or False"),
    ({"backend_config": "torch"}, "must be a BackendConfig"),
    ({"train_loop_config": 0.1}, r"train_loop_config=0\.1\): must be a dict"),
    ({"datasets": [1, 2]}, r"datasets=\[1, 2\]\): must be a dict"),
    ({"metadata": "by me"}, r"metadata='by me'\): must be a dict"),
    (
        {"run_config": RunConfig(failure_config=FailureConfig(elastic={"max_s": 1}))},
        "elastic={'max_s': 1}: must be an ElasticConfig",
    ),
]


def test_what_is_changed_in_a_restored_run_is_checked_before_anything_starts(tmp_path):
    DataParallelTrainer(
        lambda: 1, run_config=RunConfig(name="run", storage_path=tmp_path)
    )._new_folder()
    for arguments, said in (*WRONG_KINDS, ({"scalling_config": 1}, "no such argument; it takes")):
        with pytest.raises(TypeError, match=said):
            DataParallelTrainer.restore(tmp_path / "run", **arguments)
    restored = DataParallelTrainer.restore(tmp_path / "run", scaling_config={"num_workers": 3})
    assert restored.scaling_config.num_workers == 3


def test_callbacks_that_cannot_be_pickled_are_left_out_of_what_is_kept(tmp_path, caplog):
    callback = PrintCallback()
    callback.lock = threading.Lock()
    config = RunConfig(name="run", storage_path=tmp_path, callbacks=[callback])
    trainer = DataParallelTrainer(lambda: 1, run_config=config, datasets={"a": [1]})
    trainer._new_folder()
    assert "restore() will have no callbacks" in caplog.text
    assert config.callbacks == [callback]
    restored = DataParallelTrainer.restore(tmp_path / "run")
    assert restored.run_config.callbacks is None
    assert restored.datasets == {"a": [1]}


def test_a_trainer_that_cannot_be_kept_says_why_and_leaves_no_folder(tmp_path):
    lock = threading.Lock()
    config = RunConfig(name="run", storage_path=tmp_path)
    trainer = DataParallelTrainer(lambda: lock, run_config=config)
    with pytest.raises(TypeError, match=r"cannot be pickled: .*lock.* inside of the training func"):
        trainer._new_folder()
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_kept_is_named(tmp_path):
    lock = threading.Lock()
    run = RunConfig(name="run", storage_path=tmp_path)
    for function, config, named in (
        (lambda: lock, {}, "train_loop_per_worker"),
        (lambda config: 1, {"lr": 1, "guard": lock}, r"train_loop_config\['guard'\]"),
    ):
        trainer = DataParallelTrainer(function, train_loop_config=config, run_config=run)
        with pytest.raises(TypeError, match=rf"and {named} cannot be pickled: .*lock"):
            trainer._new_folder()


def test_how_to_wait_for_room_goes_on_to_trials(tmp_path):
    trainer = Trainer(BackendConfig(), logdir=tmp_path, elastic=ElasticConfig(max_attempts=7))
    trial = trainer.to_tune_trainable(lambda: 1)
    assert trial.trainer.executor()._elastic.max_attempts == 7


def test_the_config_of_a_trial_is_all_of_the_functions_config_in_the_older_api(trainer):
    trial = trainer.to_tune_trainable(lambda config: 1)
    assert trial.trial_trainer({"x": 10}).train_loop_config == {"x": 10}
    bundles = trial.default_resource_request({"x": 10}).bundles
    assert bundles == [{"CPU": 1}] * 3  # its own process, and two workers


def test_how_to_wait_for_room_is_said_with_how_often_workers_may_be_lost():
    failure = FailureConfig(max_failures=2, elastic=ElasticConfig(max_attempts=7))
    trainer = DataParallelTrainer(lambda: 1, run_config=RunConfig(failure_config=failure))
    assert trainer.executor()._elastic.max_attempts == 7
    ray_s = ray.train.FailureConfig(max_failures=2)
    trainer = DataParallelTrainer(lambda: 1, run_config=RunConfig(failure_config=ray_s))
    assert trainer.executor()._elastic == dataclasses.replace(ElasticConfig(), in_place=False)


def test_a_run_of_the_same_name_gets_a_folder_of_its_own(tmp_path):
    trainer = DataParallelTrainer(
        lambda: 1, run_config=RunConfig(name="twice", storage_path=tmp_path)
    )
    names = [trainer._new_folder().name for _ in range(3)]
    assert names == ["twice", "twice_002", "twice_003"]
    restored = DataParallelTrainer.restore(tmp_path / "twice", train_loop_config={"a": 1})
    assert restored.train_loop_config == {"a": 1}
    with pytest.raises(ValueError, match="no folder of a run"):
        DataParallelTrainer.restore(tmp_path)


def test_a_trial_calls_setup_before_it_starts_workers():
    calls = []

    class Prepared(DataParallelTrainer):
        def setup(self):
            calls.append(("setup", self.train_loop_config))

        def executor(self):
            calls.append("executor")
            return self

        def start(self):
            calls.append("start")

    trial = object.__new__(trainer_trainable(Prepared(lambda config: 1)))
    calls.clear()  # its arguments were checked
    trial.setup({"train_loop_config": {"a": 1}})
    assert calls == [("setup", {"a": 1}), "executor", "start"]


def test_a_config_is_merged_for_a_trial():
    trainer = DataParallelTrainer(lambda config: 1, train_loop_config={"a": 1, "b": 2})
    assert trainer.with_config({"b": 3}).train_loop_config == {"a": 1, "b": 3}
    assert trainer.train_loop_config == {"a": 1, "b": 2}
