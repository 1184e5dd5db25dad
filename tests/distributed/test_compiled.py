"""A replacement worker of compiled models compiles before it joins, and nobody else anew."""

import itertools
import os
import time

import pytest
import torch

from raysgd import ElasticConfig
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.ledger import PacedLedger, ledger_of, ledger_trainer
from tests.operators import replica_hash

COMPILE_S, STEP_S, BATCH = 0.5, 0.02, 8
NUM_SAMPLES = 524
"""Parts of a step have 3, 3 and 2 samples, and those of the last step of an epoch 2, 1 and 1."""


class Noting(PacedLedger):
    """Writes down when it compiles, and when its steps are done, and in what company."""

    def setup(self, config):
        self.notes = open(os.path.join(config["folder"], str(os.getpid())), "a", buffering=1)  # noqa: SIM115

        def compile_slowly(graph, inputs):
            time.sleep(COMPILE_S)
            (ids,) = (each for each in inputs if getattr(each, "dtype", None) is torch.int64)
            self.note(f"compiled-{len(ids)}")
            return graph.forward

        super().setup({**config, "register": {"compile": {"backend": compile_slowly}}})

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


@pytest.mark.slow("a worker starts anew, and all compile for three sizes")
def test_others_go_on_while_a_replacement_compiles_and_compile_nothing_themselves(
    ray_cluster, tmp_path
):
    config = {
        "num_samples": NUM_SAMPLES,
        BATCH_SIZE: BATCH,
        "step_s": STEP_S,
        "folder": str(tmp_path),
    }
    elastic = ElasticConfig(initial_s=0.05, max_s=0.05, jitter=0.0)
    with ledger_trainer(3, elastic=elastic, operator_cls=Noting, **config) as trainer:
        trainer.train(num_steps=10)
        *stay, goes = trainer.apply_all_workers(os.getpid)
        chaos.kill(trainer, 2)
        trainer.train()
        while trainer.num_workers < 3:
            trainer.train()
        trainer.train()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        counts, num_epochs, num_steps = ledger_of(trainer), trainer.epoch, trainer.global_step
        comes = trainer.apply_all_workers(os.getpid)[2]
    assert counts.sum().item() == pytest.approx(num_steps)  # each update moves by the mean
    assert num_steps == num_epochs * -(-NUM_SAMPLES // BATCH)
    assert (counts * BATCH).min() > num_epochs - 1e-3
    assert comes != goes
    notes_of_all = [notes_of(tmp_path, pid) for pid in (*stay, comes)]
    for notes in notes_of_all:  # also of two, who share the parts of three, nothing is new
        kinds = [what for _, _, what in notes]
        compiled = [what for what in kinds if what != "step"]
        assert sorted(compiled) == ["compiled-1", "compiled-2", "compiled-3"]
        assert kinds.index(compiled[-1]) < 6, "later than in the first step"
    ended = [at for at, _, what in notes_of_all[2] if what != "step"]
    steps = [at for at, _, what in notes_of_all[0] if what == "step"]
    for before, after in itertools.pairwise([ended[0] - COMPILE_S, *ended]):
        assert any(before < at < after for at in steps), "others wait for its compiler"
