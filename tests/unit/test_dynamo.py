"""``torch._dynamo`` comes late, whole, and once, whoever asks for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib, inspect, json, os, sys, threading
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel
from raysgd.dynamo import postpone_dynamo

postpone_dynamo()
NAME = "torch._dynamo"
stand_in = sys.modules[NAME]

def train():  # in a child: autograd's threads do not survive a fork
    global model, optimizer
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
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

def disables():
    @torch.compiler.disable
    def function():
        return 3
    return function() == 3

def imports_a_part():
    import torch._dynamo.config
    part = sys.modules[NAME + ".config"]
    import torch._dynamo.config as again
    return torch._dynamo.config is part is again

def imports_a_part_of_a_part():
    from torch._dynamo.backends.registry import lookup_backend
    return lookup_backend is torch._dynamo.backends.registry.lookup_backend

def imports_from_it():
    from torch._dynamo import config, reset
    return config is torch._dynamo.config and reset is torch._dynamo.reset

def sets():
    stand_in.config.suppress_errors = True
    stand_in.anything = 3
    return torch._dynamo.config.suppress_errors and sys.modules[NAME].anything == 3

def comes_from_several_threads():
    found = []
    def ask(what):
        found.append(importlib.import_module(what))
    names = [NAME + ".config", NAME, NAME + ".utils", NAME + ".config"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return len(found) == 4 and torch._dynamo.utils is sys.modules[NAME + ".utils"]

def reloads():
    import torch._dynamo.comptime
    before = torch._dynamo.comptime.comptime
    importlib.reload(torch._dynamo.comptime)
    return torch._dynamo.comptime.comptime is not before

def whole():
    try:
        import no_such_module  # what waits for an import has seen one then
    except ImportError:
        pass
    finders = [type(finder).__module__ for finder in sys.meta_path]
    parts = [name for name in sys.modules if name.startswith(NAME + ".") and name.count(".") == 2]
    return (
        sys.modules[NAME] is torch._dynamo is not stand_in
        and "raysgd.dynamo" not in finders
        and all(sys.modules[name] is getattr(torch._dynamo, name.rpartition(".")[2])
                for name in parts if name.rpartition(".")[2] in ("config", "utils", "eval_frame"))
        and steps()
        and torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__
        == NAME + ".eval_frame"
    )

def begin(way):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            said = [train(), way(), whole()]
        except BaseException as error:
            said = repr(error)
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    return os.fdopen(read)

begun = {name: begin(globals()[name]) for name in sys.argv[1:]}
print(json.dumps({name: json.load(file) for name, file in begun.items()}))
"""
WAYS = [
    "compiles",
    "steps_within_what_is_compiled",
    "disables",
    "imports_a_part",
    "imports_a_part_of_a_part",
    "imports_from_it",
    "sets",
    "comes_from_several_threads",
    "reloads",
]


@pytest.fixture(scope="module")
def found():
    """What a process finds that has postponed it; each way is gone in a fork."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *WAYS],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_training_does_not_load_it_and_it_is_there_as_soon_as_it_is_asked_for(found, way):
    assert found[way] == [True, True, True]


def test_one_that_is_loaded_already_stays():
    code = (
        "import sys, torch._dynamo; held = torch._dynamo\n"
        "from raysgd.dynamo import postpone_dynamo; postpone_dynamo()\n"
        "assert sys.modules['torch._dynamo'] is torch._dynamo is held"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120
    )
