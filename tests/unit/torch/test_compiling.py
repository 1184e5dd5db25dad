"""What ``register(compile=...)`` compiles, and which arguments it refuses."""

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd.testing import run_operator
from raysgd.torch.features.compilation import CompiledModel
from tests.operators import make_data, make_model, on_gpu, parameters, register_all

GRAPHS = []


def count(graph, inputs):
    """Be a backend of torch.compile that records graphs, and does not change them."""
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def graphs():
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()
    GRAPHS.clear()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, features):
        return torch.tanh(self.linear(features))


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, features):
        for block in self.blocks:
            features = block(features)
        return self.head(features)


class Compiled(TrainingOperator):
    def setup(self, config):
        model = config["make"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compile = config.get("compile", False)
        register_all(self, models=model, optimizers=optimizer, compile=compile)
        data = make_data(64)
        self.register_data(
            train_loader=DataLoader(data, batch_size=config.get("batch_size", 16)),
            validation_loader=DataLoader(data, batch_size=32) if "validates" in config else None,
        )


def in_torchs():
    """Deep's blocks in a module of torch's own."""
    return torch.nn.Sequential(*Deep().blocks, torch.nn.Linear(8, 2))


def trained(make, compile=False):
    config = {"make": make, "compile": compile}
    with TorchTrainer(training_operator_cls=Compiled, config=config, use_local=True) as trainer:
        trainer.train()
        model = trainer.get_model()
        return parameters(trainer.get_local_operator()), model


@pytest.mark.parametrize(
    ("make", "regional", "num_graphs"),
    [(make_model, False, 1), (Deep, False, 1), (in_torchs, False, 1), (Deep, True, 2)],
)
def test_model_is_compiled_in_place(make, regional, num_graphs):
    """Of four blocks the first is compiled for input without gradients, the others for one with."""
    expected, plain = trained(make)
    found, model = trained(make, {"backend": count, "regional": regional})
    assert len(GRAPHS) == num_graphs
    assert torch.equal(found, expected)
    assert type(model) is type(plain)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_parts_of_a_script_are_compiled_with_what_the_script_has():
    """In a worker the globals of a script are not those of ``__main__``."""
    script = {"__name__": "__main__", "torch": torch}
    exec(  # as code that was pickled by value
        "SCALE = 2.0\n"
        "class Scaled(torch.nn.Module):\n"
        "    def forward(self, features):\n"
        "        return SCALE * features\n",
        script,
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), script["Scaled"](), torch.nn.Linear(8, 2))
    expected = model(torch.ones(3, 8))
    CompiledModel(model, {"backend": count})
    torch.testing.assert_close(model(torch.ones(3, 8)), expected)
    assert len(GRAPHS) == 1


class Noisy(Deep):
    """Has statistics and random numbers, which a rehearsal must not touch."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)

    def forward(self, features):
        return super().forward(self.drop(self.norm(features)))


class Remembering(Compiled):
    def setup(self, config):
        super().setup(config)
        self.seen = []

    def train_batch(self, batch, batch_info):
        self.seen.append(len(batch[0]))
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("regional", [False, True])
def test_warm_up_compiles_and_changes_nothing_else(regional):
    config = {"make": Noisy, "compile": {"backend": count, "regional": regional}}
    learnt = []
    for warms_up in (False, True):
        with TorchTrainer(
            training_operator_cls=Remembering, config=config, use_local=True
        ) as trainer:
            operator = trainer.get_local_operator()
            if warms_up:
                trainer._controller.members[0].worker.runner.warm_up()
                num_graphs = len(GRAPHS)
                assert num_graphs > 0
                assert operator.seen == []
            trainer.train()
            assert len(operator.seen) == 4
            learnt.append(parameters(operator))
            assert not warms_up or len(GRAPHS) == num_graphs
        torch._dynamo.reset()
        GRAPHS.clear()
    assert torch.equal(*learnt)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("yes", TypeError, "must be True, False, or a dict"),
        ({"backends": "eager"}, TypeError, "unexpected keyword argument 'backends'"),
        ({"regional": True}, ValueError, "Sequential has no ModuleList or Sequential with several"),
    ],
)
def test_invalid_compile_arguments_are_an_error(given, error, message):
    with pytest.raises(error, match=message):
        run_operator(Compiled, {"make": make_model, "compile": given})


class Peeking(torch.nn.Module):
    """Breaks the graph."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 2)

    def forward(self, features):
        if features.sum().item() > 1e9:
            features = features * 2
        return self.linear(features)


def test_fullgraph_raises_at_a_break_that_an_earlier_model_of_the_process_had():
    def train(**given):
        config = {"make": Peeking, "compile": {"backend": count, **given}, "batch_size": 4}
        with TorchTrainer(training_operator_cls=Compiled, config=config, use_local=True) as trainer:
            trainer.train()

    train()
    with pytest.raises(torch._dynamo.exc.UserError, match="item"):
        train(fullgraph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_model_is_an_error():
    with pytest.raises(TypeError, match=r"torch\.jit has already compiled Sequential"):
        run_operator(Compiled, {"make": lambda: torch.jit.script(make_model()), "compile": True})


@pytest.mark.parametrize("regional", [False, True])
def test_model_can_be_registered_and_compiled_again(regional):
    model = Deep()
    config = {"make": lambda: model, "compile": {"backend": count, "regional": regional}}
    for compile, rows, num_graphs in ((config["compile"], 3, 1 + regional), (False, 4, 0)):
        GRAPHS.clear()
        run_operator(Compiled, {**config, "compile": compile}).model(torch.ones(rows, 8))
        assert len(GRAPHS) == num_graphs


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_on_a_gpu_a_compiled_model_equals_an_eager_one(make_trainer, dtype):
    precision = {} if dtype is None else {"use_fp16": True, "amp_dtype": dtype}

    def learnt(compiled):
        config = {"make": Deep, "compile": compiled, "batch_size": 24, "validates": True}
        with make_trainer(Compiled, config, use_gpu=True, **precision) as trainer:
            trainer.train()
            trainer.validate()
            return parameters(trainer.get_local_operator())

    tolerance = 1e-5 if dtype is None else 1e-2
    torch.testing.assert_close(learnt(True), learnt(False), rtol=tolerance, atol=tolerance)
