"""Write the files of a new folder.

    python -m tests.blackbox.written.runs FOLDER

After the first release, never rewrite a folder: add another one if the format changes.
"""

import json
import shutil
import sys
from pathlib import Path

import ray
import torch

from raysgd import TorchTrainer
from raysgd.callbacks import CheckpointCallback, EarlyStopping, JsonlLogger
from tests.operators import CountsBatches


class Line(CountsBatches):
    """An operator that learns y = 3 x - 1. It has everything that a state can contain."""

    def setup(self, config):
        torch.manual_seed(7)
        # no bias: the normalization would cancel it, and its gradient would be noise
        first, norm = torch.nn.Linear(1, 3, bias=False), torch.nn.BatchNorm1d(3)
        model = torch.nn.Sequential(first, norm, torch.nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model, optimizers=optimizer, schedulers=scheduler, criterion=torch.nn.MSELoss()
        )
        x = torch.linspace(0, 1, 24).reshape(-1, 1)
        data = torch.utils.data.TensorDataset(x, 3 * x - 1)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.register_data(train_loader=loader, validation_loader=loader)
        self.seen = 0


def line_trainer(folder):
    """Return a trainer of the run in a folder."""
    return TorchTrainer(
        training_operator_cls=Line,
        use_local=True,
        use_gpu=False,
        scheduler_step_freq="epoch",
        logdir=folder,
        callbacks=[CheckpointCallback(every=4, keep=2), EarlyStopping(patience=9), JsonlLogger()],
    )


def digits(trainer):
    """Return numbers that tell states apart."""
    state = trainer.state_dict()
    return {
        "epoch": state["epoch"],
        "global_step": state["global_step"],
        "seen": state["operator"]["seen"],
        **{name: tensor.double().sum().item() for name, tensor in state["models"][0].items()},
    }


def write(folder):
    """Write all runs."""
    folder.mkdir(parents=True)
    write_line(folder)
    write_keras(folder)
    write_function(folder)


def write_line(folder):
    """Write a run that stops in its third epoch, and a separate state and model."""
    with line_trainer(folder / "run") as trainer:
        trainer.fit(2)
        trainer.train(num_steps=2)
        trainer.save(folder / "state.pt")
        trainer.save_model(folder / "model.safetensors")
        (folder / "expected.json").write_text(json.dumps(digits(trainer), indent=1) + "\n")
        trainer.train()
        (folder / "next.json").write_text(json.dumps(digits(trainer), indent=1) + "\n")
    (folder / "run" / "report.html").unlink(missing_ok=True)  # large, and raysgd never reads it


def write_keras(folder):
    """Write a state with arrays."""
    import keras
    import numpy as np

    from raysgd.tf import TFTrainer
    from raysgd.tf import TrainingOperator as KerasOperator

    class Doubling(KerasOperator):
        def setup(self, config):
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
            self.model, self.optimizer, self.criterion = self.register(
                models=model,
                optimizers=keras.optimizers.Adam(),
                criterion=keras.losses.MeanSquaredError(),
            )
            x = np.linspace(0, 1, 24, dtype="float32").reshape(-1, 1)
            self.register_data(train_loader=(x, 2 * x), batch_size=4)

    with TFTrainer(training_operator_cls=Doubling, use_local=True) as trainer:
        trainer.train()
        trainer.save(folder / "keras.state")
        arrays = trainer.state_dict()["models"][0]
        sums = {name: float(array.sum()) for name, array in arrays.items()}
        (folder / "keras.json").write_text(json.dumps(sums) + "\n")


def write_function(folder):
    """Write the checkpoints of a training function."""
    from raysgd import train

    def function():
        for epoch in range(2):
            train.save_checkpoint(epoch=epoch, weights=[1.0, 2.0])

    ray.init("local", num_cpus=1, include_dashboard=False)
    trainer = train.Trainer("torch", num_workers=1, logdir=folder / "logs")
    trainer.start()
    trainer.run(function)
    trainer.latest_checkpoint_dir.rename(folder / "function")
    trainer.shutdown()
    shutil.rmtree(folder / "logs")


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
