"""Compare time and memory on a GPU: a loop by hand, DDP, raysgd, Accelerate, and Lightning.

    python examples/benchmarks/gpu.py
    python examples/benchmarks/gpu.py --workloads gpt --sides "by hand" raysgd --epochs 5

All sides train the same model on the same data with AdamW in bfloat16 autocast, each in a new
process on one GPU, one after the other. Memory is the peak of the tensors on the GPU. The last
part kills one of two raysgd workers that share the GPU. The workloads are

- *gpt*: GPT-2 small (124 million floats), 40 steps of 8 texts of 512 tokens;
- *resnet*: ResNet-50 of torchvision, 40 steps of 64 images of 224x224 pixels;
- *mlp*: a small perceptron, 1,500 steps of 256 samples, which shows the overhead of a step.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
from _workloads import machine
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"gpt": (40, 8), "resnet": (40, 64), "mlp": (1500, 256)}
"""Steps of an epoch, and samples of a step."""
NEEDS = {"Accelerate": "accelerate", "Lightning": "lightning", "resnet": "torchvision"}


class Block(torch.nn.Module):
    """Causal attention and two layers, each with a norm and a residual connection."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.attended = torch.nn.Linear(width, width)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, hidden):
        split = self.queries_keys_values(self.norms[0](hidden)).unflatten(
            -1, (3, self.num_heads, -1)
        )
        heads = split.permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.attended(mixed.transpose(1, 2).flatten(2))
        return hidden + self.layers(self.norms[1](hidden))


class GPT(torch.nn.Module):
    def __init__(self, width, num_blocks, vocabulary, length):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = torch.nn.Sequential(*(Block(width, width // 64) for _ in range(num_blocks)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(hidden))).transpose(1, 2)


class Images(torch.nn.Module):
    """ResNet-50 for images of bytes."""

    def __init__(self):
        super().__init__()
        from torchvision.models import resnet50

        self.net = resnet50()

    def forward(self, images):
        return self.net(images.float() / 255)


def make(workload, small):
    """Return the model, the optimizer, and the loader of a workload."""
    torch.manual_seed(0)
    steps, batch_size = (4, 2) if small else SIZES[workload]
    count = steps * batch_size
    if workload == "gpt":
        sizes = (64, 1, 128, 32) if small else (768, 12, 50304, 512)
        model = GPT(*sizes)
        texts = torch.randint(sizes[2], (count, sizes[3] + 1))
        data = TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())
    elif workload == "resnet":
        model = Images()
        images = torch.randint(256, (count, 3, 224, 224), dtype=torch.uint8)
        data = TensorDataset(images, torch.randint(1000, (count,)))
    else:
        layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        model = torch.nn.Sequential(*layers)
        data = TensorDataset(torch.randn(count, 64), torch.randint(10, (count,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    pinned = DEVICE == "cuda"
    return model, optimizer, DataLoader(data, batch_size, shuffle=True, pin_memory=pinned)


class Operator(TrainingOperator):
    def setup(self, config):
        model, optimizer, loader = make(config["workload"], config["smoke_test"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=loader)


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_mib():
    return torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0


def timed(function):
    wait()
    started = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - started


def by_hand(args, ddp=False):
    model, optimizer, loader = make(args.workload, args.smoke_test)
    model = model.to(DEVICE)
    if ddp:
        backend, store = "nccl" if DEVICE == "cuda" else "gloo", torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(model)

    def step(features, target):
        features = features.to(DEVICE, non_blocking=True)
        target = target.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = criterion(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    criterion = torch.nn.CrossEntropyLoss()
    result = run_epochs(args, model, loader, step)
    if ddp:
        torch.distributed.destroy_process_group()
    elif args.workload == "gpt":
        result["save_s"] = timed_save(
            lambda path: torch.save(
                {"model": model.state_dict(), "o": optimizer.state_dict()}, path
            )
        )
    return result


def accelerate(args):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=DEVICE == "cpu")
    model, optimizer, loader = accelerator.prepare(*make(args.workload, args.smoke_test))
    criterion = torch.nn.CrossEntropyLoss()

    def step(features, target):
        with accelerator.autocast():
            loss = criterion(model(features), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return run_epochs(args, model, loader, step)


def run_epochs(args, model, loader, step):
    """Train with a loop by hand, which reads the mean loss once per epoch."""

    def epoch():
        model.train()
        total = sum(step(*batch) for batch in loader)
        losses.append(float(total) / len(loader))

    losses = []
    seconds = [timed(epoch) for _ in range(1 + args.epochs)]
    return {"epochs_s": seconds[1:], "peak_mib": peak_mib(), "loss": losses[-1]}


def lightning(args):
    import lightning

    warnings.simplefilter("ignore")
    for logger in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    model, optimizer, loader = make(args.workload, args.smoke_test)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
            self.criterion = torch.nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            features, target = batch
            loss = self.criterion(self.model(features), target)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return optimizer

    class Clock(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            wait()
            self.started = time.perf_counter()

        def on_train_epoch_end(self, trainer, module):
            result["loss"] = float(trainer.callback_metrics["loss"])
            wait()
            result["epochs_s"].append(time.perf_counter() - self.started)

    result = {"epochs_s": []}
    trainer = lightning.Trainer(
        accelerator="gpu" if DEVICE == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1 + args.epochs,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)
    return {**result, "epochs_s": result["epochs_s"][1:], "peak_mib": peak_mib()}


@contextlib.contextmanager
def started_trainer(args, operator=Operator, num_workers=1, use_local=False, **elastic):
    """Yield a trainer, on an own Ray cluster unless it is local."""
    if not use_local:
        import ray

        ray.init("local", include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        training_operator_cls=operator,
        config=vars(args),
        num_workers=num_workers,
        num_cpus_per_worker=max(1, os.cpu_count() // num_workers),  # the other sides have all
        use_local=use_local,
        use_gpu=DEVICE == "cuda",
        resources_per_worker={"GPU": 0.5} if num_workers == 2 and DEVICE == "cuda" else None,
        use_fp16=True,
        amp_dtype=torch.bfloat16,
        elastic=ElasticConfig(**elastic),
    )
    with trainer:
        yield trainer
    if not use_local:
        ray.shutdown()


def raysgd(args, **options):
    with started_trainer(args, **options) as trainer:
        losses = []
        seconds = [
            timed(lambda: losses.append(trainer.train()["train_loss"]))
            for _ in range(1 + args.epochs)
        ]
        peak = max(trainer.apply_all_workers(peak_mib))
        result = {"epochs_s": seconds[1:], "peak_mib": peak, "loss": losses[-1]}
        if args.workload == "gpt" and not options:
            result["save_s"] = timed_save(trainer.save)
        return result


def timed_save(save):
    with tempfile.TemporaryDirectory() as folder:
        return timed(lambda: save(f"{folder}/state"))


class Recorder(Operator):
    """Write the time of each step and the number of workers to a file of the process."""

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        with Path(self.config["folder"], str(os.getpid())).open("a") as file:
            file.write(f"{time.time()} {self.world_size}\n")
        return result


def kill_one(args):
    """Kill one of two workers. Return the pauses of the other worker."""

    def steps(pid):
        lines = Path(folder, str(pid)).read_text().splitlines()
        return [(float(at), int(size)) for at, size in (line.split() for line in lines)]

    def kill():
        while len(steps(pids[1])) < 10:
            time.sleep(0.05)
        killed.append(time.time())
        os.kill(pids[1], signal.SIGKILL)

    def later(size):
        """Return the times of the other worker's steps in a group of `size`, since the kill."""
        times = [(at - killed[0], found) for at, found in steps(pids[0])] if killed else []
        return [at for at, found in times if at > 0 and found == size]

    with tempfile.TemporaryDirectory() as folder:
        own = argparse.Namespace(**vars(args), folder=folder)
        with started_trainer(own, Recorder, 2) as trainer:
            trainer.train(num_steps=2)
            pids, killed = trainer.apply_all_workers(os.getpid), []
            killer = threading.Thread(target=kill)
            killer.start()
            while not later(1) or not any(at > later(1)[0] for at in later(2)):
                trainer.train()
            killer.join()
            peak = max(trainer.apply_all_workers(peak_mib))
        alone = later(1)[0]
        joined = next(at for at in later(2) if at > alone)
    return {"next_step_s": alone, "full_size_s": joined, "peak_mib": peak}


SIDES = {
    "by hand": by_hand,
    "DDP": lambda args: by_hand(args, ddp=True),
    "raysgd": raysgd,
    "raysgd, local": lambda args: raysgd(args, use_local=True),
    "raysgd, epoch": lambda args: raysgd(args, snapshot_every="epoch"),
    "Accelerate": accelerate,
    "Lightning": lightning,
}
"""The third and the fourth take snapshots by default, the fifth at each epoch."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--epochs", type=int, default=4, help="counted epochs after the first")
    parser.add_argument("--no-kill", action="store_true", help="skip the loss of a worker")
    parser.add_argument("--smoke-test", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.smoke_test:
        parser.exit(0, "This benchmark needs an NVIDIA GPU, and PyTorch finds none.\n")
    if args.smoke_test:
        args.epochs = 1
    if args.side:
        args.workload = args.workloads[0]
        run = kill_one if args.side == "kill" else SIDES[args.side]
        Path(args.json).write_text(json.dumps(run(argparse.Namespace(**{**vars(args), "json": 0}))))
        return
    about = machine() | {"gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = {workload: compare(workload, args) for workload in args.workloads}
    result = {"machine": about, "rows": rows}
    if not args.no_kill:
        row = result["kill"] = run_side("kill", "gpt", args)
        print(
            f"\none of two workers killed, gpt: next step after {row['next_step_s']:.2f} s", end=""
        )
        print(f", full size after {row['full_size_s']:.1f} s, peak {row['peak_mib']:.0f} MiB")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def compare(workload, args):
    """Run all sides on one workload, and print their rows."""
    print(f"\n{workload:14}{'epoch':>9}{'by hand = 1':>13}{'peak':>12}{'loss':>9}{'save':>9}")
    rows = {}
    for side in args.sides:
        missing = [NEEDS[name] for name in (side, workload) if name in NEEDS]
        missing = [name for name in missing if importlib.util.find_spec(name) is None]
        if missing:
            print(f"{side:14} needs {missing[0]}, which is not installed")
            continue
        row = rows[side] = run_side(side, workload, args)
        middle = row["median_s"] = statistics.median(row["epochs_s"])
        ratio = middle / next(iter(rows.values()))["median_s"]
        saved = f"{row['save_s']:7.2f} s" if "save_s" in row else ""
        print(
            f"{side:14}{middle:7.3f} s{ratio:13.3f}{row['peak_mib']:8.0f} MiB"
            f"{row['loss']:9.3f}{saved}",
            flush=True,
        )
    return rows


def run_side(side, workload, args):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, __file__, "--side", side, "--workloads", workload]
        command += ["--epochs", str(args.epochs), "--json", str(path)]
        subprocess.run(command + ["--smoke-test"] * args.smoke_test, check=True)
        return json.loads(path.read_text())


if __name__ == "__main__":
    main()
