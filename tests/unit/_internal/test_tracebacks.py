"""What an uncaught error of user code prints."""

import linecache
import re
import traceback

import pytest

from raysgd import TorchTrainer
from raysgd._internal.tracebacks import is_user_file, last_frame
from tests.conftest import run_python
from tests.operators import Classifier

SCRIPT = """
import signal, sys
import torch
from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback

class Data:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if KIND == "loader" and index == 9:
            raise ValueError("sample 9 is broken")
        is_wide = index >= 8 * (KIND != "fit") and KIND in ("shape", "compile", "stack", "fit")
        return torch.ones(5 + (KIND == "stack") * index if is_wide else 3), torch.tensor(0)
class Compiled(torch.nn.Linear):
    @torch.compile(backend="eager")
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)
class Broken(TrainingOperator):
    def setup(self, config):
        model = Compiled(3, 2) if KIND == "compile" else torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"optimizer" if KIND == "typo" else "optimizers": optimizer}
        self.model, self.optimizer, self.criterion = self.register(
            models=model, criterion=torch.nn.CrossEntropyLoss(), **names)
        loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=KIND == "loader")
        self.register_data(train_loader=loader, validation_loader=loader)
    def train_batch(self, batch, batch_info):
        if KIND == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        return super().train_batch(batch, batch_info)
    def predict_batch(self, batch, batch_info):
        return self.helper(batch)
    def helper(self, batch):
        return batch["image"]
    def state_dict(self):
        return {"lock": sys.stdout} if KIND == "lock" else {}
class Fails(Callback):
    def on_epoch_end(self, trainer, metrics):
        metrics["accuracy"]

def main():
    trainer = TorchTrainer(training_operator_cls=Broken, use_local=True, use_gpu=False)
    if KIND == "predict":
        trainer.predict(trainer.get_local_operator().train_loader)
    every = 1 if KIND == "fit" else None
    trainer.fit(1, validate_every=every, callbacks=[Fails()] * (KIND == "callback"))
    trainer.save("state.pt")

for KIND in sys.argv[1:]:
    try:
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as if the error had left the script
    print("----", file=sys.stderr)
"""
BATCH = r"batch \[float32\[4, 5\], int64\[4\]\]"


LAST = {
    "shape": rf"Raised on worker 0, in step 3, {BATCH}, in train_batch, .+\.py:\d+",
    "compile": rf"Raised on worker 0, in step 3, {BATCH}, in forward, .+\.py:\d+",
    "stack": r"Raised on worker 0, when reading the batch of step 3",
    "loader": r"Raised on worker 0, when reading .* step 3, in __getitem__, .+\.py:\d+",
    "fit": r"Raised on worker 0, in batch 1, \[float32\[4, .*\]",
    "predict": r"Raised on worker 0, in batch 1, \[float.*\], in helper, .+\.py:\d+",
    "lock": r".*: Cannot save to .* the operator on worker 0 after step 3 could not .*",
    "typo": r"Raised on worker 0, in setup, .+\.py:\d+",
    "callback": r".*CallbackError: The callback Fails failed in on_epoch_end: KeyError.*",
    "ctrl-c": r"KeyboardInterrupt.*",
}


@pytest.mark.slow("starts a process, because pytest changes tracebacks")
def test_an_error_that_leaves_a_script_prints_few_lines(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = run_python(path, *LAST, cwd=tmp_path)
    for printed, (kind, last) in zip(done.stderr.split("----\n"), LAST.items(), strict=False):
        lines = printed[re.search("^Traceback", printed, re.M).start() :].splitlines()
        assert len(lines) <= 15, printed
        assert re.fullmatch(last, lines[-1]), printed
        assert "main()" in printed
        assert ("Did you mean 'optimizers'?" in printed) == (kind == "typo")


@pytest.mark.parametrize(("shown", "num_frames"), [("", 2), ("full", 4)])
def test_a_variable_shows_all_frames(monkeypatch, shown, num_frames):
    monkeypatch.setenv("RAYSGD_TRACEBACK", shown)
    trainer = TorchTrainer(training_operator_cls=Classifier, use_local=True, use_gpu=False)
    with trainer, pytest.raises(ValueError, match="at least 1") as caught:
        trainer.fit(0)
    with pytest.raises(TypeError, match=r"^TorchTrainer\.fit\(\) got .* Did you mean 'num_epochs'"):
        trainer.fit(epochs=2)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len(frames) >= num_frames if shown else len(frames) == num_frames
    assert frames[-1].name == "as_int"


@pytest.mark.parametrize(
    ("source", "shown"), [("loss.backwards()", ": loss.backwards()"), ("", "")]
)
def test_the_driver_shows_the_line_of_a_notebook_cell_if_it_knows_it(monkeypatch, source, shown):
    cell = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(linecache.cache, cell, (len(source), None, [f"{source}\n"], cell))
    _, frame = last_frame(f'  File "{cell}", line 1, in train_batch\nAttributeError: backwards\n')
    assert frame == f'  File "{cell}", line 1, in train_batch{shown}'


OF_KERAS = (
    'in user code:\n\n    File "<string>", line 1\n\n    wrong\n\n    Arguments received by f'
)


def own_cause():
    try:
        raise ValueError(OF_KERAS)
    except ValueError as error:
        raise error from error


def test_an_error_that_is_its_own_cause_is_folded():
    trainer = TorchTrainer(training_operator_cls=Classifier, use_local=True, use_gpu=False)
    with trainer, pytest.raises(ValueError, match=r"^wrong\n") as caught:
        trainer.apply_all_workers(own_cause)
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 2
    assert not is_user_file("/tmp/__autograph_generated_file1.py")
    assert re.search(r", in own_cause, .+\.py:\d+$", caught.value.__notes__[-1])
