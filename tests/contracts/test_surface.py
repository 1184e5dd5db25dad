"""Pins the public names and the main arguments, so that each change is deliberate."""

import importlib
import importlib.util
import inspect
import pkgutil

import pytest

import raysgd

SURFACE = {
    "raysgd": """
        BadSteps CreatorOperator ElasticConfig EqualBits Guard TFTrainer TorchTrainer
        TrainingOperator __version__
    """,
    "raysgd.backends": "CollectiveBackend WorkerContext backend_names create_backend",
    "raysgd.callbacks": """
        BatchProgress CallInfo Callback CheckpointCallback CsvLogger DeviceStatsMonitor EMA
        EarlyStopping EpochPrinter History JsonlLogger LearningRateMonitor LoggerCallback
        MLflowLogger ModelSummary ProgressBar RunReport SWA TensorBoardLogger TerminateOnNaN
        TorchProfiler WandbLogger
    """,
    "raysgd.checkpoint": """
        CheckpointStore Manifest RestoredCheckpoint read_file read_manifest save_model write_file
    """,
    "raysgd.data": "Dataset Stream jsonl mix parquet tar text",
    "raysgd.elastic.config": "ElasticConfig",
    "raysgd.elastic.events": "Event EventKind",
    "raysgd.elastic.speed": "SpeedReport WorkerSpeed",
    "raysgd.errors": """
        BadStepsError CallbackError CheckpointError CollectiveError InsufficientResourcesError
        RaySGDError RemoteError RemoteTraceback ReplicasDifferError WorkerLostError
        WorkerTimeoutError
    """,
    "raysgd.metrics": """
        BATCH_COUNT NUM_SAMPLES AverageMeter AverageMeterCollection MergeableMetric Sums ratio
    """,
    "raysgd.operators": """
        GAN ConfiguredOperator ImageClassifier LanguageModel Regressor SemanticSegmenter
        SequenceClassifier SupervisedOperator WithMetrics
    """,
    "raysgd.testing": "run_operator",
    "raysgd.testing.chaos": "Chaos Fault InjectedFault draw_faults kill",
    "raysgd.tf": "TFTrainer TrainingOperator",
    "raysgd.torch": "CreatorOperator TorchTrainer TrainingOperator",
    "raysgd.torch.constants": """
        NCCL_TIMEOUT_S NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH
        SCHEDULER_STEP_MANUAL SGD_PLACEMENT_GROUP_TIMEOUT_S USE_FP16 VALID_SCHEDULER_STEP
    """,
    "raysgd.torch.trainer": "TorchTrainer",
    "raysgd.torch.torch_trainer": "TorchTrainer",
    "raysgd.torch.training_operator": "CreatorOperator TrainingOperator",
    "raysgd.torch.operator": "CreatorOperator TrainingOperator",
    "raysgd.train": """
        Backend BackendConfig Checkpoint CheckpointConfig CheckpointStrategy DataParallelTrainer
        FailureConfig Result RunConfig ScalingConfig TrainContext Trainer TrainingCallback
        TrainingIterator get_checkpoint get_context get_dataset_shard load_checkpoint local_rank
        report save_checkpoint world_rank world_size
    """,
    "raysgd.train.backend": """
        Backend BackendConfig BackendExecutor InactiveWorkerGroupError TrainBackendError
        TrainingWorkerError WorkerGroup
    """,
    "raysgd.train.callbacks": """
        JsonLoggerCallback MLflowLoggerCallback PrintCallback TBXLoggerCallback
        TorchTensorboardProfilerCallback TrainingCallback
    """,
    "raysgd.train.callbacks.logging": "JsonLoggerCallback MLflowLoggerCallback TBXLoggerCallback",
    "raysgd.train.callbacks.results_preprocessors": """
        AverageResultsPreprocessor ExcludedKeysResultsPreprocessor IndexedResultsPreprocessor
        MaxResultsPreprocessor ResultsPreprocessor SequentialResultsPreprocessor
        WeightedAverageResultsPreprocessor
    """,
    "raysgd.train.callbacks.print": "PrintCallback",
    "raysgd.train.callbacks.profile": "TorchTensorboardProfilerCallback",
    "raysgd.train.huggingface.transformers": """
        RayTrainReportCallback get_checkpoint_path prepare_trainer
    """,
    "raysgd.train.lightning": """
        RayDDPStrategy RayLightningEnvironment RayTrainReportCallback get_checkpoint_path
        prepare_trainer
    """,
    "raysgd.train.torch": """
        TorchAccelerator TorchBackend TorchConfig TorchTrainer TorchWorkerProfiler accelerate
        backward enable_reproducibility get_device prepare_data_loader prepare_model
        prepare_optimizer
    """,
    "raysgd.train.trainer": "TrainWorkerGroup Trainer TrainingIterator",
    "raysgd.tune": "BaseTorchTrainable BaseTrainable TFTrainable trainable_class",
    "raysgd.utils": """
        BATCH_COUNT BATCH_SIZE NUM_SAMPLES AverageMeter AverageMeterCollection TimerCollection
        TimerStat override
    """,
}
"""The names of each public module."""

TRAINER_ARGUMENTS = {
    "training_operator_cls": inspect.Parameter.empty,
    "initialization_hook": None,
    "config": None,
    "num_workers": 1,
    "min_workers": 1,
    "num_cpus_per_worker": 1,
    "resources_per_worker": None,
    "use_gpu": "auto",
    "backend": "auto",
    "wrap_ddp": True,
    "timeout_s": 1800,
    "use_fp16": False,
    "amp_dtype": None,
    "use_tqdm": False,
    "add_dist_sampler": True,
    "scheduler_step_freq": None,
    "split_on_oom": True,
    "use_local": False,
    "elastic": None,
    "callbacks": (),
    "logdir": None,
}

NEEDED = {
    "raysgd.tf": ("tensorflow",),
    "raysgd.train.huggingface.transformers": ("accelerate", "transformers"),
    "raysgd.train.lightning": ("lightning",),
}
"""Packages that a module or a package of modules needs."""


def missing(module):
    """Return the packages that a module needs and that are not installed."""
    needed = [p for home, packages in NEEDED.items() if module.startswith(home) for p in packages]
    return [package for package in needed if importlib.util.find_spec(package) is None]


def modules():
    """Return every module of the library that can be imported here."""
    found = [raysgd]
    for info in pkgutil.walk_packages(raysgd.__path__, "raysgd.", onerror=lambda name: None):
        if not missing(info.name):
            found.append(importlib.import_module(info.name))
    return found


MODULES = modules()


@pytest.mark.parametrize("name", SURFACE)
def test_a_public_module_offers_exactly_these_names(name):
    if missing(name):
        pytest.skip(f"{' and '.join(missing(name))} not installed")
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(SURFACE[name].split())
    for attribute in module.__all__:
        assert getattr(module, attribute) is not None


def test_the_names_of_raysgd_are_in_dir_and_are_the_objects_of_their_modules():
    """Another name is an attribute error."""
    assert set(SURFACE["raysgd"].split()) <= set(dir(raysgd))
    for name in ("CreatorOperator", "TorchTrainer", "TrainingOperator"):
        assert getattr(raysgd, name) is getattr(importlib.import_module("raysgd.torch"), name)
    for home, name in (
        ("raysgd", "CreatorOperator"),
        ("raysgd.torch.operator", "CreatorOperator"),
        ("raysgd.torch.trainer", "BaseTorchTrainable"),
        ("raysgd.torch.torch_trainer", "BaseTorchTrainable"),
    ):
        older = importlib.import_module(home)
        assert getattr(older, name) is getattr(importlib.import_module("raysgd.torch"), name)
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = older.Nothing
    home = importlib.import_module("raysgd.train.callbacks.results_preprocessors")
    for part in ("aggregate", "index", "keys", "preprocessor"):
        older = importlib.import_module(f"{home.__name__}.{part}")
        assert all(getattr(older, name) is getattr(home, name) for name in home.__all__)
    home = importlib.import_module("raysgd.elastic.config")
    assert raysgd.ElasticConfig is home.ElasticConfig


def test_the_trainer_takes_these_arguments_with_these_defaults():
    """An argument may be added. None may be removed, get another default, or be positional."""
    parameters = inspect.signature(raysgd.TorchTrainer).parameters
    for name, default in TRAINER_ARGUMENTS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if name != "training_operator_cls":
            assert parameters[name].default == default, name


METHODS = {
    "raysgd.TorchTrainer": """
        train: num_steps profile reduce_results max_retries info dataset
        validate: num_steps profile reduce_results info
        fit: num_epochs validate_every callbacks max_retries info
        test: loader info
        predict: loader
        request_stop: reason
        update_scheduler: metric
        get_model: to_cpu
        save: path
        save_model: path
        load_state_dict: state blocking
        shutdown: force
    """,
    "raysgd.callbacks.Callback": """
        on_train_start: trainer
        on_train_end: trainer
        on_epoch_end: trainer metrics
        on_partial_epoch_end: trainer metrics
        on_validation_end: trainer metrics
        on_epoch_result: trainer call metrics
        on_event: trainer event
        on_exception: trainer error
        on_pause: trainer
        on_progress: trainer kind progress
        next_pause: global_step
    """,
    "raysgd.TrainingOperator": """
        setup: config
        train_epoch: iterator info num_steps epoch_idx
        train_batch: batch batch_info
        validate: val_iterator info
        validate_batch: batch batch_info
        predict_batch: batch batch_info
    """,
    "raysgd.train.Trainer": """
        __init__: backend num_workers use_gpu resources_per_worker logdir max_retries
        start: initialization_hook
        run: train_func config callbacks dataset checkpoint checkpoint_strategy
        run_iterator: train_func config dataset checkpoint checkpoint_strategy
        to_tune_trainable: train_func dataset
    """,
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_their_arguments_in_this_order(name):
    home, _, owner = name.rpartition(".")
    for line in METHODS[name].strip().splitlines():
        method, *names = line.replace(":", "").split()
        function = getattr(getattr(importlib.import_module(home), owner), method)
        assert list(inspect.signature(function).parameters)[1 : len(names) + 1] == names, method
