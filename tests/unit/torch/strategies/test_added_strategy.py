"""A strategy is a file and a row: local SGD averages models every few updates, not gradients."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Guard, TrainingOperator
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.requests import PrepareExportRequest, TrainRequest
from raysgd.loop.state_placement import StatePlacement
from raysgd.torch.strategies.collective_exchange import broadcast_models
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.strategies.table import STRATEGIES, Strategy
from tests.unit.torch import cases

EVERY, NUM_STEPS = 3, 7


class LocalModels(StatePlacement, UpdateFeature):
    """Each worker trains its own models. The workers average them every few updates."""

    replicates = False

    def __init__(self, train_state, sharding_args):
        self._train_state, self._every, self.features = train_state, sharding_args["every"], (self,)

    def sync_initial_state(self):
        broadcast_models(self._train_state)

    def commit(self, update):
        if self._train_state.position.global_step % self._every == 0:
            self.before_export()

    def before_export(self):
        parameters = [p.data for model in self._train_state.models for p in model.parameters()]
        averages = [p / self._train_state.settings.context.world_size for p in parameters]
        for average in averages:  # the parameters stay if a worker is lost here
            torch.distributed.all_reduce(average)
        torch._foreach_copy_(parameters, averages)


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 5).double()
    return model, torch.optim.Adafactor(model.parameters(), lr=0.1)


class Local(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer = make(self.world_rank)
        local = {"sharding": "local", "sharding_args": {"every": EVERY}}
        self.register(models=self.model, optimizers=self.optimizer, **local)
        x = torch.linspace(0, 99, 3 * (8 * NUM_STEPS - 1), dtype=torch.float64).sin()
        self.register_data(train_loader=DataLoader(TensorDataset(x.view(-1, 3)), batch_size=4))

    def train_batch(self, batch, batch_info):
        (self.batch,) = batch  # the last one is smaller on one worker
        self.backward(self.model(self.batch).square().mean())
        self.optimizer_step(self.optimizer)
        return {}


LOCAL = Strategy(lambda _: GradientExchange(), LocalModels, ["every"])


class Case(cases.Case):
    operator_cls = Local

    def run(self, rank):
        """Return the batch of each step, and the parameters after it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(STRATEGIES, "local", LOCAL)
            runner, found = self.start(rank), []
        for step in range(1, NUM_STEPS + 1):
            runner.handle(TrainRequest(call_number=step, until_step=step))
            if step == NUM_STEPS:
                runner.handle(PrepareExportRequest())
            found.append((runner.operator.batch, cases.parameters_of(runner)))
        return found


def test_local_sgd_averages_models_every_few_updates_and_in_exports(workers):
    results = workers(Case(settings={"guard": Guard(every=1)}))
    plain = make(0), make(0)
    for step, pair in enumerate(zip(*results, strict=True), start=1):
        for (model, optimizer), (batch, _) in zip(plain, pair, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        expected = [[p.detach() for p in model.parameters()] for model, _ in plain]
        is_average = step % EVERY == 0 or step == NUM_STEPS
        for first, second in zip(*expected, strict=True) if is_average else ():
            second.copy_(first.add_(second).div_(2))
        found = [parameters for _, parameters in pair]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert all(map(torch.equal, *found)) == is_average


def test_an_option_that_chooses_another_strategy_is_an_error(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "local", LOCAL)
    with pytest.raises(ValueError, match=r'sharding="local"\) does not work with the strategy "'):
        Case(num_workers=1, settings={"wrap_ddp": False}).start(0)
