"""``torch._dynamo`` loads on first use, completely, and once."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_python

CODE = """
import datetime, importlib, importlib.util, inspect, json, os, pickle, sys, threading
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel
from raysgd._internal.dynamo import postpone_dynamo
from raysgd.comm.gloo import GlooGroup

NAME = "torch._dynamo"

def begin(*acts):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            said = [act() for act in acts]
        except BaseException as error:
            said = repr(error)
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    return os.fdopen(read)

def was_loaded_before():
    import torch._dynamo
    held = torch._dynamo
    postpone_dynamo()
    return sys.modules[NAME] is torch._dynamo is held

begun = {"was_loaded_before": begin(was_loaded_before)}
postpone_dynamo()
stand_in = sys.modules[NAME]

def train():  # in a child: autograd's threads do not survive a fork
    global model, optimizer
    GlooGroup.init(torch.distributed.HashStore(), 0, 1, datetime.timedelta(seconds=30))
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    steps()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    inspect.getmodule(inspect.currentframe())  # looks at every module that there is
    return NAME + ".eval_frame" not in sys.modules

def steps():
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return True

def compiles():
    for each in (model, model.module):
        torch.compile(each, backend="eager")(torch.ones(1, 3)).sum().backward()
    found = torch._dynamo.utils.counters
    # DistributedDataParallel's own forward is left out, by the function that was asked meanwhile
    return found["stats"]["unique_graphs"] == 1 and "_inside_ddp_forward" in str(found)

def steps_within_what_is_compiled():
    torch.compile(steps, backend="eager")()
    return True

def imports_a_part():
    import torch._dynamo.config
    part = sys.modules[NAME + ".config"]
    import torch._dynamo.config as again
    # and it is the one that the others in there have
    return torch._dynamo.config is part is again is torch._dynamo.eval_frame.config

def kept_the_stand_in():
    utils = stand_in.utils  # answers nothing by itself from now on
    pickled = [pickle.loads(pickle.dumps(stand_in)) is stand_in]
    stand_in.config.optimize_ddp = "python_reducer"
    names = ("disable", "graph_break", "utils", "config", "__file__")
    pickled.append(pickle.loads(pickle.dumps(stand_in)) is torch._dynamo is not stand_in)
    return (
        all(pickled)
        and all(getattr(stand_in, name) is getattr(torch._dynamo, name) for name in names)
        and utils.get_optimize_ddp_mode() == stand_in.utils.get_optimize_ddp_mode()
        == "python_reducer" and utils.counters is torch._dynamo.utils.counters
    )

def comes_from_several_threads():
    found = []
    def ask(what):
        found.append(importlib.import_module(what))
    names = [NAME + ".config", NAME, NAME + ".utils", NAME + ".config"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return len(found) == 4 and torch._dynamo.utils is sys.modules[NAME + ".utils"]

def whole():
    parts = [f"{NAME}.{name}" for name in ("config", "utils", "eval_frame", "trace_rules")]
    ask = torch.optim.Optimizer.zero_grad.__wrapped__
    return (
        type(sys.modules[NAME]) is type(sys) and sys.modules[NAME] is torch._dynamo
        and all(sys.modules[name] is getattr(torch._dynamo, name.rpartition(".")[2])
                for name in parts)
        and steps() and ask.__dynamo_disable.__module__ == NAME + ".eval_frame"
    )

begun |= {
    ways: begin(train, *(globals()[way] for way in ways.split()), whole) for ways in sys.argv[1:]}
print(json.dumps({name: json.load(file) for name, file in begun.items()}))
"""
WAYS = [
    "compiles steps_within_what_is_compiled",
    "imports_a_part",
    "kept_the_stand_in",
    "comes_from_several_threads",
]
"""Functions of `CODE` that load ``torch._dynamo``. Each entry runs in one fork."""


@pytest.fixture(scope="module")
def found():
    """Results of a process that has postponed ``torch._dynamo``, by entry of `WAYS`."""
    command, root = ("-W", "ignore", "-c", CODE, *WAYS), Path(__file__).parents[3]
    done = run_python(*command, cwd=root, OMP_NUM_THREADS="1")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow("the first test waits for all forks, and two of them compile")
@pytest.mark.parametrize("ways", WAYS)
def test_dynamo_loads_on_first_use_and_not_by_training(found, ways):
    assert found[ways] == [True, *(True for _ in ways.split()), True]


def test_a_loaded_dynamo_stays(found):
    assert found["was_loaded_before"] == [True]
