"""The number of samples in batches whose first tensor does not show it."""

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TrainingOperator
from raysgd.testing import run_operator
from raysgd.torch.input.batches import has_masked_labels
from tests.conftest import assert_names
from tests.operators import register_with_sgd
from tests.unit.loop.test_given_loaders import OwnBatches

NUM_SAMPLES = 10
FEATURES = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0)).double()
TARGET = FEATURES.sum(1, keepdim=True)


def squares(output, target):
    return (output - target).square().mean()


def detection(keys):
    return FEATURES[keys], [{"boxes": TARGET[k].repeat(1 + k % 3, 1)} for k in keys]


def lists(keys):
    _, targets = detection(keys)
    return tuple(FEATURES[k].expand(1 + k % 2, 3) for k in keys), tuple(targets)


def nested(keys):
    images, targets = lists(keys)
    return torch.nested.nested_tensor([*images]), targets


def box_loss(output, target):
    return torch.stack([squares(o, t["boxes"]) for o, t in zip(output, target, strict=True)]).mean()


def concatenated(keys):
    lengths = torch.tensor([1 + k % 3 for k in keys])
    return FEATURES[keys], (TARGET[keys].flatten().repeat_interleave(lengths), lengths)


def loss_of_parts(output, target):
    parts = target[0].split(target[1].tolist())
    return torch.stack([squares(o, part) for o, part in zip(output, parts, strict=True)]).mean()


def time_major(keys):
    return FEATURES[keys].expand(5, len(keys), 3), TARGET[keys].expand(5, len(keys), 1)


class Net(torch.nn.Linear):
    def forward(self, features):
        if isinstance(features, tuple) or features.is_nested:
            features = torch.stack([each.mean(0) for each in features])
        return super().forward(features)


def make_model():
    torch.manual_seed(0)
    return Net(3, 1).double()


class Counts(TrainingOperator):
    def setup(self, config):
        register_with_sgd(self, make_model(), gradient_accumulation_steps=2)
        self.criterion = config["criterion"]
        given = {"batch_sampler": config["batches"]} if config.get("batches") else {"batch_size": 4}
        loader = DataLoader(range(NUM_SAMPLES), collate_fn=config["collate"], **given)
        if config.get("is_stream"):
            loader = list(loader)
        self.register_data(train_loader=loader, validation_loader=loader)


FORMATS = {
    "detection": (detection, box_loss),
    "lists": (lists, box_loss),
    "nested": (nested, box_loss),
    "concatenated": (concatenated, loss_of_parts),
    "time-major": (time_major, squares),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", FORMATS)
def test_loader_knows_the_number_of_samples(make_trainer, kind, caplog):
    collate, criterion = FORMATS[kind]
    trainer = make_trainer(Counts, {"collate": collate, "criterion": criterion})
    validated, trained = trainer.validate(), trainer.train()
    assert validated["num_samples"] == trained["num_samples"] == NUM_SAMPLES
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features, target = collate(range(NUM_SAMPLES))
    assert validated["val_loss"] == pytest.approx(criterion(model(features), target).item())
    for keys in (range(8), range(8, 10)):
        features, target = collate(keys)
        optimizer.zero_grad()
        criterion(model(features), target).backward()
        optimizer.step()
    states = [each.state_dict() for each in (trainer.get_model(), model)]
    torch.testing.assert_close(*states, atol=1e-14, rtol=0)
    assert not caplog.records


def some(keys):
    kept = [k for k in keys if k % 3]
    return FEATURES[kept], TARGET[kept]


@pytest.mark.parametrize(
    "config",
    [
        {"collate": detection, "criterion": box_loss, "is_stream": True},
        {"collate": some, "criterion": squares},
    ],
)
def test_unclear_number_of_samples_is_one_warning(make_trainer, config, caplog):
    trainer = make_trainer(Counts, config)
    trainer.validate()
    trainer.train()
    (record,) = caplog.records
    assert_names(record.getMessage(), ["rows", "num_items(batch)"])


LABELS = torch.tensor([[[0, 1, -100, -100]] * 2] * 4)


class Tokens(TrainingOperator):
    """Computes its own loss. With `config["counts"]`, counts tokens."""

    def setup(self, config):
        steps = config["steps"]
        register_with_sgd(self, torch.nn.Linear(2, 3), gradient_accumulation_steps=steps)

    def train_batch(self, batch, batch_info):
        labels = batch["labels"].flatten()
        loss = torch.nn.functional.cross_entropy(self.model(batch["x"]).flatten(0, 1), labels)
        self.backward(loss, num_items=4 if self.config["counts"] else None)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": 2}


@pytest.mark.parametrize(
    ("counts", "steps", "warns"), [(False, 2, True), (True, 2, False), (False, 1, False)]
)
def test_masked_labels_without_a_count_are_one_warning(counts, steps, warns, caplog):
    operator = run_operator(Tokens, {"counts": counts, "steps": steps})
    batches = [{"x": torch.ones(2, 4, 2), "labels": labels} for labels in LABELS]
    for _ in "ab":
        operator.train_epoch(iter(batches))
    assert caplog.text.count("override num_items(batch): return (batch['labels'] != -100)") == warns
    assert has_masked_labels({"target": LABELS[0]})


@pytest.mark.parametrize("batches", [None, OwnBatches(range(NUM_SAMPLES), 4, False)])
def test_batch_info_has_the_number_of_samples(make_trainer, batches):
    class Notes(Counts):
        def train_batch(self, batch, batch_info):
            counts.append(batch_info["num_samples"])
            assert len(batch[0]) == 5  # the time is not split
            return super().train_batch(batch, batch_info)

    counts = []
    config = {"collate": time_major, "criterion": squares, "batches": batches}
    trainer = make_trainer(Notes, config)
    trainer.train()
    trainer.get_local_operator()._train_state.micro_batching.increase_num_splits(2)
    trainer.train()
    assert (counts[:3], {*counts[3:]}) == ([4, 4, 2], {None})  # unknown for parts of batches


class Classes(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        register_with_sgd(self, config["model"].double(), criterion=config["criterion"])
        self.register_data(validation_loader=DataLoader(config["data"], batch_size=4))


OnGpu = type("OnGpu", (torch.Tensor,), {"device": torch.device("cuda")})
IGNORE_INDEX = {
    "classes": (torch.nn.CrossEntropyLoss(), (23,), -100),
    "pixels": (torch.nn.CrossEntropyLoss(ignore_index=2), (23, 5), 2),
    "no class": (lambda output, target: output.square().mean(), (23,), -1),
}


@pytest.mark.parametrize("kind", IGNORE_INDEX)
def test_ignored_targets_do_not_count_in_the_accuracy(make_trainer, kind):
    criterion, shape, ignored = IGNORE_INDEX[kind]
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(*shape, 3, generator=generator).double().movedim(-1, 1)
    target = torch.randint(0, 3, shape, generator=generator)
    target[torch.rand(shape, generator=generator) < 0.5] = ignored
    target[4:8], target[20:] = ignored, 0
    data = list(zip(features, target.as_subclass(OnGpu), strict=True))
    model = torch.nn.Conv1d(3, 3, 1) if shape[1:] else torch.nn.Linear(3, 3)
    trainer = make_trainer(Classes, {"model": model, "criterion": criterion, "data": data})
    trainer.get_local_operator()._train_state.position.global_step = 3
    found = trainer.validate()
    with torch.no_grad():
        output = trainer.get_model()(features)
    hits = (output.argmax(1) == target)[target != ignored]
    assert found["val_accuracy"] == pytest.approx(hits.double().mean().item())
    assert found["val_loss"] == pytest.approx(criterion(output, target).item())
