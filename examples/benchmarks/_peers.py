"""raysgd and its alternatives. Each has two workers that train an epoch on request.

All sides start with the same weights and read the same data in the same order. Their losses must
agree after each epoch. Each follows the documentation of its library.
"""

import contextlib
import functools
import logging
import multiprocessing.connection
import os
import socket
import threading
import time

import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _workloads import BATCH_SIZES, NUM_WORKERS, make_data, make_model, make_optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from raysgd import TorchTrainer, TrainingOperator

PATIENCE_S = 180


def raw_worker(rank, name, num_steps, pipe, compiled=False):
    """Train as PyTorch's DistributedDataParallel tutorial does."""
    dist.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)
    model = make_model(name)
    model = DistributedDataParallel(torch.compile(model) if compiled else model)
    data = make_data(name, num_steps)
    loop = ByHand(model, data, BATCH_SIZES[name], rank, NUM_WORKERS)
    pipe.send("ready")
    while (epoch := pipe.recv()) is not None:
        pipe.send(loop.epoch(epoch))
    dist.destroy_process_group()


class ByHand:
    """A loop as in PyTorch's tutorials."""

    def __init__(self, model, data, batch_size, rank=0, num_workers=1):
        self.model, self.optimizer = model, make_optimizer(model)
        self.criterion = torch.nn.MSELoss()
        self.sampler = DistributedSampler(data, num_workers, rank)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler)

    def epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = 0.0
        self.model.train()
        for features, target in self.loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), target)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.loader)

    def close(self):
        pass


class SharedOrder(Sampler):
    """The order of DistributedSampler, for libraries that partition the data themselves."""

    def __init__(self, data):
        self.data = data
        self.epoch = 0

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self.data), generator=generator).tolist())


def accelerate_worker(rank, name, num_steps, pipe):
    """Train as the quick tour of Accelerate does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data = make_data(name, num_steps)
    order = SharedOrder(data)
    model = make_model(name)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), DataLoader(data, batch_size=BATCH_SIZES[name], sampler=order)
    )
    criterion = torch.nn.MSELoss()
    pipe.send("ready")
    while (epoch := pipe.recv()) is not None:
        order.epoch = epoch
        total = 0.0
        model.train()
        for features, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        pipe.send(total / len(loader))
    accelerator.end_training()


def lightning_worker(rank, name, num_steps, pipe):
    """Train with a LightningModule whose epochs wait for a request."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model(name)
            self.criterion = torch.nn.MSELoss()

        def training_step(self, batch, index):
            features, target = batch
            loss = self.criterion(self.model(features), target)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return make_optimizer(self.model)

    loader = DataLoader(make_data(name, num_steps), batch_size=BATCH_SIZES[name], shuffle=True)
    fit_on_demand(Module(), loader, pipe, "ddp")


def fit_on_demand(module, loader, pipe, strategy):
    """Make a Lightning trainer wait for a request before each epoch."""
    import lightning

    for logger in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)

    class OnDemand(lightning.Callback):
        def on_train_start(self, trainer, module):
            pipe.send("ready")

        def on_train_epoch_start(self, trainer, module):
            if pipe.recv() is None:
                trainer.should_stop = True
                raise KeyboardInterrupt

        def on_train_epoch_end(self, trainer, module):
            pipe.send(float(trainer.callback_metrics["loss"]))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_WORKERS,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[OnDemand()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, loader)


class Processes:
    """Two processes with one thread each, started like those of torchrun."""

    def __init__(self, worker, name, num_steps):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.pipes, ends = zip(*(mp.Pipe() for _ in range(NUM_WORKERS)), strict=True)
        self.context = mp.spawn(
            _run, (worker, name, num_steps, port, ends), nprocs=NUM_WORKERS, join=False
        )
        self._collect()

    def _collect(self):
        answers = []
        for pipe in self.pipes:
            waited = time.monotonic()
            while not pipe.poll(0.5):
                self.context.join(timeout=0)  # raises the error of a process
                if time.monotonic() - waited > PATIENCE_S:
                    raise SystemExit(f"A worker has not answered for {PATIENCE_S} s.")
            answers.append(pipe.recv())
        return answers

    def epoch(self, epoch):
        for pipe in self.pipes:
            pipe.send(epoch)
        multiprocessing.connection.wait(self.pipes, PATIENCE_S)
        return sum(self._collect()) / NUM_WORKERS

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        self.context.join(timeout=30)
        for process in self.context.processes:
            process.kill()


def _run(rank, worker, name, num_steps, port, pipes):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_WORKERS}
    environment = {**ranks, "LOCAL_WORLD_SIZE": NUM_WORKERS, "GROUP_RANK": 0, "NODE_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    worker(rank, name, num_steps, pipes[rank])


@ray.remote(num_cpus=0, max_concurrency=8)
class Gate:
    """Starts epochs of Ray Train workers, and notifies the driver of their end."""

    def __init__(self):
        self.epochs = [threading.Event() for _ in range(1000)]
        self.losses = {}
        self.changed = threading.Condition()

    def open(self, epoch):
        self.epochs[epoch].set()

    def enter(self, epoch):
        self.epochs[epoch].wait(PATIENCE_S)

    def leave(self, epoch, loss):
        with self.changed:
            self.losses.setdefault(epoch, []).append(loss)
            self.changed.notify_all()

    def wait_for(self, epoch):
        with self.changed:
            done = self.changed.wait_for(
                lambda: len(self.losses.get(epoch, ())) == NUM_WORKERS, PATIENCE_S
            )
            return sum(self.losses[epoch]) / NUM_WORKERS if done else None


def ray_train_worker(config):
    """Train like the guide of Ray Train, with a report after each epoch."""
    import ray.train
    import ray.train.torch

    gate = config["gate"]
    model = ray.train.torch.prepare_model(make_model(config["name"]))
    optimizer = make_optimizer(model)
    criterion = torch.nn.MSELoss()
    data = make_data(config["name"], config["num_steps"])
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(data, batch_size=BATCH_SIZES[config["name"]], shuffle=True)
    )
    for epoch in range(config["num_epochs"]):
        ray.get(gate.enter.remote(epoch))
        loader.sampler.set_epoch(epoch)
        total = 0.0
        model.train()
        for features, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        ray.train.report({"loss": total / len(loader)})
        gate.leave.remote(epoch, total / len(loader))


class RayTrain:
    def __init__(self, name, num_steps, num_epochs):
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer as RayTorchTrainer

        self.gate = Gate.remote()
        trainer = RayTorchTrainer(
            ray_train_worker,
            train_loop_config={
                "gate": self.gate,
                "name": name,
                "num_steps": num_steps,
                "num_epochs": num_epochs,
            },
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        )
        self.thread = threading.Thread(target=trainer.fit, daemon=True)
        self.thread.start()

    def epoch(self, epoch):
        ray.get(self.gate.open.remote(epoch))
        return ray.get(self.gate.wait_for.remote(epoch))

    def close(self):
        self.thread.join(PATIENCE_S)


class Regression(TrainingOperator):
    def setup(self, config):
        model = make_model(config["name"])
        self.model, self.optimizer, self.criterion = self.register(
            models=torch.compile(model) if config["compiled"] else model,
            optimizers=make_optimizer(model),
            criterion=torch.nn.MSELoss(),
        )
        data = make_data(config["name"], config["num_steps"])
        torch.manual_seed(0)  # the seed of DistributedSampler
        batch_size = BATCH_SIZES[config["name"]]
        self.register_data(train_loader=DataLoader(data, batch_size=batch_size, shuffle=True))


class Raysgd:
    def __init__(self, name, num_steps, compiled=False, **arguments):
        self.trainer = TorchTrainer(
            training_operator_cls=Regression,
            config={"name": name, "num_steps": num_steps, "compiled": compiled},
            **{"num_workers": NUM_WORKERS, "min_workers": NUM_WORKERS} | arguments,
        )

    def epoch(self, epoch):
        return self.trainer.train()["train_loss"]

    def close(self):
        self.trainer.shutdown()


PEERS = {
    "raw DDP": lambda name, num_steps, num_epochs: Processes(raw_worker, name, num_steps),
    "raysgd": lambda name, num_steps, num_epochs: Raysgd(name, num_steps),
    "Lightning": lambda name, num_steps, num_epochs: Processes(lightning_worker, name, num_steps),
    "Accelerate": lambda name, num_steps, num_epochs: Processes(accelerate_worker, name, num_steps),
    "Ray Train": RayTrain,
}
"""Each starts its workers and returns when they are ready or wait in their first epoch."""

COMPILED_PEERS = {
    "raw DDP": lambda name, num_steps, num_epochs: Processes(
        functools.partial(raw_worker, compiled=True), name, num_steps
    ),
    "raysgd": lambda name, num_steps, num_epochs: Raysgd(name, num_steps, compiled=True),
}
"""The same with compiled models."""

GUARD_PEERS = {
    "no guard": lambda name, num_steps, num_epochs: Raysgd(name, num_steps, guard=None),
    "guard": lambda name, num_steps, num_epochs: Raysgd(name, num_steps),
}
"""raysgd without and with comparisons of the replicas."""

EXACT_PEERS = {
    "default": lambda name, num_steps, num_epochs: Raysgd(name, num_steps),
    "exact": lambda name, num_steps, num_epochs: Raysgd(name, num_steps, exact="bits"),
}
"""raysgd without and with equal bits for any number of workers."""

LOCAL_PEERS = {
    "by hand": lambda name, num_steps, num_epochs: ByHand(
        make_model(name), make_data(name, num_steps), BATCH_SIZES[name]
    ),
    "raysgd": lambda name, num_steps, num_epochs: Raysgd(
        name, num_steps, num_workers=1, min_workers=1, use_local=True
    ),
}
"""One worker in this process."""
