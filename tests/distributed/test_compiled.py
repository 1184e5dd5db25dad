"""A replacement worker of compiled models compiles before it joins, and nobody else anew."""

import itertools
import os
import time

import pytest

from raysgd import ElasticConfig
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.conftest import wait_until
from tests.ledger import PacedLedger, ledger_of, ledger_trainer
from tests.operators import replica_hash

COMPILE_S, STEP_S = 1.0, 0.02


class Noting(PacedLedger):
    """Writes down when it compiles, and when its steps are done, and in what company."""

    def setup(self, config):
        self.notes = open(os.path.join(config["folder"], str(os.getpid())), "a", buffering=1)  # noqa: SIM115

        def compile_slowly(graph, inputs):
            time.sleep(COMPILE_S)
            self.note("compiled")
            return graph.forward

        super().setup({**config, "register": {"compile": {"backend": compile_slowly}}})

    def note(self, what):
        self.notes.write(f"{time.monotonic()} {self.world_size} {what}\n")

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        self.note("step")
        return metrics


def notes_of(folder, pid):
    lines = (folder / str(pid)).read_text().splitlines()
    return [(float(at), int(size), what) for at, size, what in map(str.split, lines)]


@pytest.mark.slow("a worker starts anew, and compiles twice")
def test_others_go_on_while_a_replacement_compiles_and_compile_nothing_themselves(
    ray_cluster, tmp_path
):
    config = {"num_samples": 4000, BATCH_SIZE: 8, "step_s": STEP_S, "folder": str(tmp_path)}
    elastic = ElasticConfig(initial_s=0.05, max_s=0.05, jitter=0.0)
    with ledger_trainer(2, elastic=elastic, operator_cls=Noting, **config) as trainer:
        trainer.train(num_steps=10)
        stays, goes = trainer.apply_all_workers(os.getpid)
        chaos.kill(trainer, 1)
        trainer.train()
        wait_until(lambda: trainer.num_workers == 2)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        ledger = ledger_of(trainer)
        comes = trainer.apply_all_workers(os.getpid)[1]
    assert (ledger == 1).sum() + (ledger == 2).sum() == 4000
    assert (ledger == 2).sum() <= 4  # the share of the one that was lost in its last step
    stayed, came = notes_of(tmp_path, stays), notes_of(tmp_path, comes)
    assert comes != goes
    kinds = [what for _, _, what in came]
    assert kinds[0] == "compiled"
    assert "compiled" not in kinds[kinds.index("step") :]
    steps = [(at, size) for at, size, what in stayed if what == "step"]
    lost = next(i for i, (_, size) in enumerate(steps) if size == 1)
    joined = next(i for i, (_, size) in enumerate(steps) if i > lost and size == 2)
    # alone it had batches of another size, for which it has compiled, but for none since
    anew = [at for at, _, what in stayed if what == "compiled" and at > steps[joined][0]]
    assert not anew
    longest = max(b - a for (a, _), (b, _) in itertools.pairwise(steps[joined - 5 : joined + 5]))
    assert longest < COMPILE_S
