"""Run cases on workers in separate processes, without Ray."""

import contextlib
import datetime
import itertools
import pickle
import traceback

import torch.distributed as dist

from tests.conftest import running_ranks

PLAY = """
from {module} import NUM_WORKERS, run
from tests.unit.torch.cases import play

play(run, rank, NUM_WORKERS, dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
"""


@contextlib.contextmanager
def running_cases(module):
    """Yield a function that passes a case to ``run`` of a module on its ``NUM_WORKERS`` workers.

    The function returns the results by rank.
    """
    with running_ranks(PLAY.format(module=module.__name__), module.NUM_WORKERS) as store:
        store.set_timeout(datetime.timedelta(seconds=30))
        numbers = itertools.count()

        def run(case):
            number = next(numbers)
            store.set(f"cases/{number}", pickle.dumps(case))
            keys = [f"results/{number}/{rank}" for rank in range(module.NUM_WORKERS)]
            results = [pickle.loads(store.get(key)) for key in keys]
            assert not any(isinstance(each, str) for each in results), "\n".join(map(str, results))
            return results

        yield run
        store.set(f"cases/{next(numbers)}", pickle.dumps(None))


def play(run, rank, num_workers, store):
    """Run cases from the store until one is None."""
    for number in itertools.count():
        if (case := pickle.loads(store.get(f"cases/{number}"))) is None:
            break
        own = dist.PrefixStore(f"group-{number}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=num_workers)
        try:
            result = run(case, rank)
        except Exception:
            result = traceback.format_exc()
        store.set(f"results/{number}/{rank}", pickle.dumps(result))
        dist.destroy_process_group()
    print("good")
