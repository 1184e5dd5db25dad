"""Arguments and folders of the trainers; no worker is started."""

import re
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


@pytest.fixture
def trainer(tmp_path):
    elastic = ElasticConfig(max_start_attempts=7, snapshot_every=None)
    return Trainer(BackendConfig(), num_workers=2, logdir=tmp_path, elastic=elastic)


def test_before_a_run_there_is_no_folder_and_no_checkpoint(trainer):
    assert trainer.latest_run_dir is None
    assert trainer.latest_checkpoint is trainer.get_latest_checkpoint() is None
    assert trainer.latest_checkpoint_dir is trainer.latest_checkpoint_path is None
    assert trainer.best_checkpoint is None
    assert trainer.best_checkpoint_path is None
    assert trainer._executor._elastic.snapshot_every is not None  # checkpoints are snapshots


def test_trainers_created_in_the_same_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "run_folder", lambda kind, _: tmp_path / f"{kind}_now")
    names = [Trainer(BackendConfig()).logdir.name for _ in range(2)]
    assert names == ["train_now", "train_now_002"]


def test_each_run_has_a_new_folder_also_with_the_logdir_of_another_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module.BackendExecutor, "is_started", True)
    monkeypatch.setattr(trainer_module.BackendExecutor, "start_training", lambda *arguments: None)
    monkeypatch.setattr(trainer_module.BackendExecutor, "abort", lambda executor: None)
    first, second = (Trainer(BackendConfig(), logdir=tmp_path) for _ in range(2))
    folders = []
    for each in (first, second, first):
        each.run_iterator(print)
        folders.append(each.latest_run_dir)
    assert [folder.name for folder in folders] == ["run_001", "run_002", "run_003"]


def test_trainers_of_frameworks_have_their_backend(monkeypatch):
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


@pytest.mark.parametrize("choices", [{"val": "no"}, {"val": {"split": False}}, {"vall": True}])
def test_choices_of_data_sets_to_split_are_checked(choices):
    match = rf"dataset_config={re.escape(str(choices))}\): must be True or False .*\(train, val\)"
    with pytest.raises(ValueError, match=match):
        DataParallelTrainer(print, dataset_config=choices, datasets={"train": 1, "val": 2})


def test_a_label_selector_of_ray_train_is_refused():
    try:
        selected = ray.train.ScalingConfig(label_selector={"region": "eu"})
    except TypeError:
        pytest.skip("this Ray has no label selectors")
    with pytest.raises(ValueError, match=r"label_selector=.*custom resource"):
        DataParallelTrainer(lambda: 1, scaling_config=selected)


WRONG_KINDS = [
    ({"run_config": {"name": "mine"}}, "run_config={'name': 'mine'}: must be a RunConfig"),
    ({"run_config": RunConfig(failure_config={"max_failures": 1})}, "must be a FailureConfig"),
    ({"run_config": RunConfig(checkpoint_config=2)}, "must be a CheckpointConfig"),
    ({"run_config": RunConfig(callbacks=PrintCallback())}, "must be a list"),
    ({"scaling_config": 2}, "scaling_config=2: must be a ScalingConfig"),
    ({"scaling_config": {"use_gpu": "auto"}}, "use_gpu='auto': must be True or False"),
    ({"backend_config": "torch"}, "must be a BackendConfig"),
    ({"train_loop_config": 0.1}, r"train_loop_config=0\.1\): must be a dict"),
    ({"datasets": [1, 2]}, r"datasets=\[1, 2\]\): must be a dict"),
    ({"metadata": "by me"}, r"metadata='by me'\): must be a dict"),
    ({"dataset_config": ["train"]}, r"dataset_config=\['train'\]\): must be a dict"),
    (
        {"run_config": RunConfig(failure_config=FailureConfig(elastic={"backoff_max_s": 1}))},
        r"elastic={'backoff_max_s': 1}\): must be an ElasticConfig",
    ),
]


WRONG_VALUES = [
    ({"scaling_config": ScalingConfig(num_workers=0)}, "num_workers"),
    ({"scaling_config": {"resources_per_worker": {"GPU": 1}}}, "use_gpu"),
    ({"run_config": RunConfig(name="..")}, "must be the name of a folder"),
    ({"run_config": RunConfig(storage_path="s3://bucket/a")}, "not a URL.*Mount the storage"),
    ({"run_config": RunConfig(failure_config=FailureConfig(-2))}, r"\(max_failures=-2\)"),
]


@pytest.mark.parametrize(("arguments", "match"), [*WRONG_KINDS, *WRONG_VALUES])
def test_wrong_arguments_for_fit_are_refused_before_anything_starts(arguments, match):
    kind = TypeError if (arguments, match) in WRONG_KINDS else ValueError
    with pytest.raises(kind, match=match):
        DataParallelTrainer(lambda: 1, **arguments)


@pytest.fixture
def run_config(tmp_path):
    return RunConfig(name="run", storage_path=tmp_path)


def test_arguments_for_a_restored_run_are_checked_as_well(tmp_path, run_config):
    DataParallelTrainer(lambda: 1, run_config=run_config)._prepare_folder()
    for arguments, match in (WRONG_KINDS[0], ({"scalling_config": 1}, "mean 'scaling_config'")):
        with pytest.raises(TypeError, match=match):
            DataParallelTrainer.restore(tmp_path / "run", **arguments)
    restored = DataParallelTrainer.restore(tmp_path / "run", scaling_config={"num_workers": 3})
    assert restored.scaling_config.num_workers == 3
    with pytest.raises(ValueError, match=r"contains no trainer\.pkl"):
        DataParallelTrainer.restore(tmp_path)


def test_restore_takes_the_function_and_its_config_by_position(tmp_path, run_config):
    first, second = (lambda config, n=n: n for n in (1, 2))
    DataParallelTrainer(first, train_loop_config={"a": 1}, run_config=run_config)._prepare_folder()
    changed = DataParallelTrainer.restore(tmp_path / "run", second, {"a": 2})
    assert changed.train_loop_per_worker is second
    assert changed.train_loop_config == {"a": 2}
    kept = DataParallelTrainer.restore(tmp_path / "run", train_loop_config={"a": 3})
    assert kept.train_loop_per_worker({}) == 1
    assert kept.train_loop_config == {"a": 3}
    with pytest.raises(ValueError, match="longer"):
        DataParallelTrainer.restore(tmp_path / "run", second, {}, 3)


def test_a_run_is_stored_without_callbacks_that_cannot_be_pickled(tmp_path, run_config, caplog):
    callback = PrintCallback()
    callback.lock = threading.Lock()
    run_config.callbacks = [callback]
    DataParallelTrainer(lambda: 1, run_config=run_config, datasets={"a": [1]})._prepare_folder()
    assert "Pass them again to restore(path" in caplog.text
    assert run_config.callbacks == [callback]
    restored = DataParallelTrainer.restore(tmp_path / "run")
    assert restored.run_config.callbacks is None
    assert restored.datasets == {"a": [1]}


@pytest.mark.parametrize(
    ("locked_config", "name"),
    [(True, r"train_loop_config\['guard'\]"), (False, r"train_loop_per_worker \(uses lock\)")],
)
def test_what_cannot_be_stored_is_named_and_leaves_no_folder(
    tmp_path, run_config, locked_config, name
):
    lock = threading.Lock()
    trainer = DataParallelTrainer(
        (lambda config: 1) if locked_config else (lambda config: lock),
        train_loop_config={"lr": 1, "guard": lock if locked_config else 2},
        run_config=run_config,
    )
    with pytest.raises(TypeError, match=rf"but {name} cannot be pickled: .*lock"):
        trainer._prepare_folder()
    assert not (tmp_path / "run").exists()


def test_configs_reach_old_style_trials_and_fit(trainer):
    trial = trainer.to_tune_trainable(lambda config: 1)
    assert trial.trial_trainer({"x": 10}).train_loop_config == {"x": 10}
    bundles = trial.default_resource_request({"x": 10}).bundles
    assert bundles == [{"CPU": 1}] * 3  # its own process, and two workers
    assert trial.trial_trainer({}).create_executor()._elastic.max_start_attempts == 7
    failure = FailureConfig(max_failures=2, elastic=ElasticConfig(max_start_attempts=7))
    trainer = DataParallelTrainer(lambda: 1, run_config=RunConfig(failure_config=failure))
    assert trainer.create_executor()._elastic.max_start_attempts == 7
    rays = ray.train.FailureConfig(max_failures=2)
    trainer = DataParallelTrainer(lambda: 1, run_config=RunConfig(failure_config=rays))
    assert trainer.create_executor()._elastic == ElasticConfig()
    assert trainer.create_executor()._max_retries == 2


def test_a_trial_calls_setup_before_it_starts_workers():
    calls = []

    class Prepared(DataParallelTrainer):
        def setup(self):
            calls.append(("setup", self.train_loop_config))

        def create_executor(self):
            calls.append("executor")
            return self

        def start(self):
            calls.append("start")

    trial = object.__new__(Prepared(lambda config: 1).as_trainable())
    calls.clear()  # the constructor calls executor() to check the arguments
    trial.setup({"train_loop_config": {"a": 1}})
    assert calls == [("setup", {"a": 1}), "executor", "start"]
    with pytest.raises(ValueError, match=r"only train_loop_config and scaling_config, not a\."):
        trial.setup({"a": 1})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"train": True, "val": False}),
        ({"val": True}, {"train": True, "val": True}),
        ({"*": False, "val": True}, {"train": False, "val": True}),
    ],
)
def test_only_the_data_set_train_is_split_by_default(given, expected):
    trainer = DataParallelTrainer(print, dataset_config=given)
    assert {name: trainer._is_split(name) for name in ("train", "val")} == expected
