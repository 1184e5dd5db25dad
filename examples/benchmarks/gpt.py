"""Compare training of a small sharded GPT in raysgd and with FSDP2 by hand.

    python examples/benchmarks/gpt.py
    python examples/benchmarks/gpt.py --runs 5 --floats 10000000 --sides "FSDP2 by hand" "full"

Each side has two workers with one thread each, which stay alive for the whole run. The sides take
turns, so that the load of the machine is the same for all. Their losses must agree.

*By hand* uses PyTorch's ``fully_shard`` or DistributedDataParallel in the loop of their tutorials.
*Lightning* uses its ``ModelParallelStrategy`` (left out if it is not installed). *Full* and
*optimizer* are ``register(sharding=...)`` of raysgd, without and with one replica of each shard.
*DDP* is raysgd without ``sharding``, also without comparisons of the replicas. raysgd takes
snapshots if 1 % of the time pays for them. ``--steps`` sets the length of an epoch, and
``--no-snapshots`` disables snapshots.
(Accelerate 1.15 does not shard models on CPUs.)
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from _peers import Processes, fit_on_demand
from _workloads import NUM_WORKERS, in_turn, machine, spread
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator

VOCABULARY, LENGTH, BATCH_SIZE, NUM_BLOCKS = 512, 64, 8, 4
WARM_UP = 1
TOLERANCE = 1e-4


class Block(torch.nn.Module):
    """Causal attention and two layers, each with a norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.before_attention = torch.nn.LayerNorm(width)
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.attended = torch.nn.Linear(width, width)
        self.before_layers = torch.nn.LayerNorm(width)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, hidden):
        split = self.queries_keys_values(self.before_attention(hidden)).unflatten(
            -1, (3, self.num_heads, -1)
        )
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        found = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True
        )
        hidden = hidden + self.attended(found.transpose(1, 2).flatten(2))
        return hidden + self.layers(self.before_layers(hidden))


class GPT(torch.nn.Module):
    """A next-token model with about `floats` parameters."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        # A block has 12 times the square of the width. The embedding and the output come on top.
        width = math.isqrt(VOCABULARY**2 // NUM_BLOCKS**2 // 144 + floats // (12 * NUM_BLOCKS))
        width = max(8, (width - VOCABULARY // (12 * NUM_BLOCKS)) // 8 * 8)
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).flatten(0, 1)


def make_gpt(floats):
    torch.manual_seed(0)
    return GPT(floats)


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_texts(num_steps):
    """Return input and target tokens for `num_steps` steps of all workers."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(
        VOCABULARY, (num_steps * BATCH_SIZE * NUM_WORKERS, LENGTH + 1), generator=generator
    )
    return TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())


def loss_of(outputs, target):
    return torch.nn.functional.cross_entropy(outputs, target.flatten())


def by_hand(is_sharded, rank, floats, num_steps, pipe):
    """Train like PyTorch's tutorials on FSDP2 and DistributedDataParallel."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)
    model = make_gpt(floats)
    if is_sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (NUM_WORKERS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = make_adamw(model)
    data = make_texts(num_steps)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    pipe.send("ready")
    while (epoch := pipe.recv()) is not None:
        sampler.set_epoch(epoch)
        total = 0.0
        model.train()
        for tokens, target in loader:
            optimizer.zero_grad()
            loss = loss_of(model(tokens), target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        pipe.send(total / len(loader))
    dist.destroy_process_group()


fsdp_by_hand = functools.partial(by_hand, True)
ddp_by_hand = functools.partial(by_hand, False)


def by_lightning(rank, floats, num_steps, pipe):
    """Train like Lightning's page on FSDP2."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_gpt(floats)

        def configure_model(self):
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch, index):
            tokens, target = batch
            loss = loss_of(self.model(tokens), target)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return make_adamw(self.model)

    loader = DataLoader(make_texts(num_steps), batch_size=BATCH_SIZE, shuffle=True)
    strategy = ModelParallelStrategy(data_parallel_size=NUM_WORKERS, tensor_parallel_size=1)
    fit_on_demand(Module(), loader, pipe, strategy)


class Language(TrainingOperator):
    def setup(self, config):
        torch.set_num_threads(1)
        model = make_gpt(config["floats"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=make_adamw(model),
            criterion=loss_of,
            **config["register"],
        )
        torch.manual_seed(0)  # the seed of DistributedSampler
        data = make_texts(config["num_steps"])
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))


class Raysgd:
    snapshot_every = "auto"

    def __init__(self, floats, num_steps, guard="check", **register):
        self.trainer = TorchTrainer(
            training_operator_cls=Language,
            config={"floats": floats, "num_steps": num_steps, "register": register},
            num_workers=NUM_WORKERS,
            min_workers=NUM_WORKERS,
            elastic=ElasticConfig(snapshot_every=self.snapshot_every),
            guard=guard,
        )

    def epoch(self, epoch):
        return self.trainer.train()["train_loss"]

    def close(self):
        self.trainer.shutdown()


def divided(sharding, copies):
    return {"sharding": sharding, "sharding_args": {"num_copies": copies}}


SIDES = {
    "FSDP2 by hand": lambda floats, num_steps: Processes(fsdp_by_hand, floats, num_steps),
    "DDP by hand": lambda floats, num_steps: Processes(ddp_by_hand, floats, num_steps),
    "Lightning": lambda floats, num_steps: Processes(by_lightning, floats, num_steps),
    "full": lambda floats, num_steps: Raysgd(floats, num_steps, **divided("full", 0)),
    "full, a copy": lambda floats, num_steps: Raysgd(floats, num_steps, **divided("full", 1)),
    "optimizer": lambda floats, num_steps: Raysgd(floats, num_steps, **divided("optimizer", 0)),
    "DDP, no guard": functools.partial(Raysgd, guard=None),
    "DDP": Raysgd,
}


def time_epochs(floats, num_steps, runs, names):
    """Return the tokens per second of each side, and its epochs relative to the first side."""
    sides = {name: SIDES[name](floats, num_steps) for name in names}
    losses = {}

    def timed(name):
        def epoch(run):
            started = time.perf_counter()
            losses[name] = sides[name].epoch(run)
            seconds = time.perf_counter() - started
            if abs(losses[name] / losses[names[0]] - 1) > TOLERANCE:
                raise SystemExit(f"losses differ in epoch {run}: {losses}")
            return seconds

        return epoch

    seconds = in_turn(runs, {name: timed(name) for name in names}, WARM_UP)
    for side in sides.values():
        side.close()
    num_tokens = num_steps * BATCH_SIZE * NUM_WORKERS * LENGTH
    return {
        name: {
            "tokens_s": spread([num_tokens / each for each in seconds[name]]),
            "ratio": spread([a / b for a, b in zip(seconds[name], seconds[names[0]], strict=True)]),
        }
        for name in names
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="counted epochs of each side")
    parser.add_argument("--steps", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--floats", type=int, default=8_000_000)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--no-snapshots", action="store_true")
    parser.add_argument("--smoke-test", action="store_true", help="a small model, two runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    if "Lightning" in args.sides and importlib.util.find_spec("lightning") is None:
        args.sides.remove("Lightning")
    if args.smoke_test:
        args.runs, args.steps, args.floats = 2, 2, 50_000
    if args.no_snapshots:
        Raysgd.snapshot_every = None
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=5 * NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    count = sum(p.numel() for p in make_gpt(args.floats).parameters())
    rows = time_epochs(args.floats, args.steps, args.runs, args.sides)
    print(f"a GPT of {count:,} floats, {args.steps} steps of two workers, {args.runs} runs in turn")
    for name, row in rows.items():
        tokens, ratio = row["tokens_s"], row["ratio"]
        print(
            f"{name:14} {tokens['median']:8.0f} tokens/s   epoch {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f})"
        )
    if args.json:
        result = {"machine": machine(), "floats": count, "gpt": rows}
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
