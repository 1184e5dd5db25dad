"""A replacement worker compiles its model with a warm-up batch before it joins."""

import os
import time

import pytest
import torch

from raysgd import ElasticConfig
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.ledger import PacedLedger, ledger_of, ledger_trainer
from tests.operators import replica_hash

COMPILE_S, STEP_S, BATCH = 0.5, 0.02, 6
NUM_SAMPLES = 360
"""Each of two workers has three samples in every step."""


class Noting(PacedLedger):
    """Logs the time and the world size of each compilation and each step."""

    def setup(self, config):
        self.notes = open(os.path.join(config["folder"], str(os.getpid())), "a", buffering=1)  # noqa: SIM115

        def compile_slowly(graph, inputs):
            time.sleep(COMPILE_S)
            (ids,) = (each for each in inputs if getattr(each, "dtype", None) is torch.int64)
            self.note(f"compiled-{len(ids)}")
            return graph.forward

        super().setup(config)
        self.unwrapped(self.model).compile(backend=compile_slowly)

    def note(self, what):
        self.notes.write(f"{time.monotonic()} {self.world_size} {what}\n")

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])
        self.backward(-self.model(batch).mean(), num_samples=len(batch))
        self.optimizer_step(self.optimizer)
        self.note("step")
        return {"num_samples": len(batch)}


def notes_of(folder, pid):
    lines = (folder / str(pid)).read_text().splitlines()
    return [(float(at), int(size), what) for at, size, what in map(str.split, lines)]


@pytest.mark.slow("a worker is replaced, and all of them compile")
def test_others_train_while_a_replacement_compiles(ray_cluster, tmp_path):
    config = {
        "num_samples": NUM_SAMPLES,
        BATCH_SIZE: BATCH,
        "step_s": STEP_S,
        "folder": str(tmp_path),
    }
    elastic = ElasticConfig(initial_s=0.05, max_s=0.05)
    with ledger_trainer(2, elastic=elastic, operator_cls=Noting, **config) as trainer:
        trainer.train(num_steps=10)
        stays, goes = trainer.apply_all_workers(os.getpid)
        chaos.kill(trainer, 1)
        trainer.train()
        while trainer.num_workers < 2:
            trainer.train()
        trainer.train()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        counts, num_epochs, num_steps = ledger_of(trainer), trainer.epoch, trainer.global_step
        comes = trainer.apply_all_workers(os.getpid)[1]
    assert counts.sum().item() == pytest.approx(num_steps)  # each step adds 1 in total
    assert num_steps == num_epochs * -(-NUM_SAMPLES // BATCH)
    assert (counts * BATCH).min() > num_epochs - 1e-3
    assert comes != goes
    of_survivor, of_replacement = (notes_of(tmp_path, pid) for pid in (stays, comes))
    kinds = [what for _, _, what in of_replacement]
    assert kinds[0] == "compiled-3"
    assert set(kinds[1:]) == {"step"}, "it compiled after it joined, or trained the warm-up batch"
    compiled_at = of_replacement[0][0]
    steps = [at for at, _, what in of_survivor if what == "step"]
    assert any(compiled_at - COMPILE_S < at < compiled_at for at in steps), "others waited"
