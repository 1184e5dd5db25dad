"""Scripts for Accelerate, Lightning, and Transformers.

Each returns the final weights, the first epoch, and the number of processes. In the middle of each
epoch it calls `fault` with the epoch and the rank.
"""

import tempfile
from pathlib import Path

from raysgd import train
from raysgd.train import Checkpoint

NUM_EPOCHS, FAULT_EPOCH = 3, 1


def rows():
    """Return twenty-four samples and their targets."""
    import torch

    x = torch.linspace(-1, 1, 96).reshape(24, 4).cos()
    return x, x.sum(dim=1, keepdim=True)


def line():
    """Return a layer with the same weights on each worker."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def no_fault(epoch, rank):
    pass


def fail(epoch, rank):
    """Raise on rank 0 in `FAULT_EPOCH`."""
    if (epoch, rank) == (FAULT_EPOCH, 0):
        raise KeyError("in the middle of an epoch")


def accelerate(folder, fault=no_fault):
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*rows()), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            accelerator.load_state(saved)
            first = int(Path(saved, "epoch").read_text()) + 1
    for epoch in range(first, NUM_EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            fault(epoch, accelerator.process_index)
        with tempfile.TemporaryDirectory() as made:
            accelerator.save_state(made)
            Path(made, "epoch").write_text(str(epoch))
            saved = Checkpoint.from_directory(made)
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=saved)
    layer = accelerator.unwrap_model(model)
    return layer.weight.tolist(), first, accelerator.num_processes


def lightning(folder, fault=no_fault):
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from raysgd.train.lightning import RayTrainReportCallback, get_checkpoint_path

    class Module(pl.LightningModule):
        first = None

        def __init__(self):
            super().__init__()
            self.layer = line()

        def training_step(self, batch, batch_idx):
            if self.first is None:
                self.first = self.current_epoch
            if batch_idx == 1:
                fault(self.current_epoch, self.global_rank)
            loss = (self.layer(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = Module()
    trainer = pl.Trainer(
        max_epochs=NUM_EPOCHS,
        callbacks=[RayTrainReportCallback()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*rows()), batch_size=4, shuffle=True)
    trainer.fit(module, loader, ckpt_path=get_checkpoint_path())
    return module.layer.weight.tolist(), module.first, trainer.world_size


def transformers(folder, fault=no_fault):
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from raysgd.train.huggingface.transformers import (
        RayTrainReportCallback,
        get_checkpoint_path,
        prepare_trainer,
    )

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = line()

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    class Watch(TrainerCallback):
        first = None

        def on_step_end(self, args, state, control, **others):
            self.first = int(state.epoch) if self.first is None else self.first
            if state.global_step % 3 == 2:
                fault(int(state.epoch), args.process_index)

    watch = Watch()
    trainer = Trainer(
        Model(),
        TrainingArguments(
            folder,
            num_train_epochs=NUM_EPOCHS,
            per_device_train_batch_size=4,
            learning_rate=0.1,
            save_strategy="epoch",
            logging_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"x": x, "labels": y} for x, y in zip(*rows(), strict=True)],
        callbacks=[watch, RayTrainReportCallback()],
    )
    prepare_trainer(trainer).train(resume_from_checkpoint=get_checkpoint_path())
    return trainer.model.layer.weight.tolist(), watch.first, trainer.args.world_size


SCRIPTS = {script.__name__: script for script in (accelerate, lightning, transformers)}
