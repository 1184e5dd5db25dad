"""A thread that kills worker processes at random."""

import random
import signal
import threading

import psutil


class Fire(threading.Thread):
    """A thread that kills a worker every 0.4 to 2.2 s, while it trains or starts.

    The seed decides when and which. The thread ends when `enough` returns True.
    """

    enough = staticmethod(lambda: False)

    def __init__(self, seed, pauses_s=(0.4, 2.2)):
        super().__init__(daemon=True)
        self.pauses_s = pauses_s
        self._draw = random.Random(seed)
        self._over = threading.Event()
        self.num_kills = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.end()

    def end(self):
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self):
        while not (self._over.wait(self._draw.uniform(*self.pauses_s)) or self.enough()):
            if found := _workers():
                self._draw.choice(found).send_signal(signal.SIGKILL)
                self.num_kills += 1


def _workers():
    """Return the child processes that run a raysgd worker. Ray names them after the actor."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith("ray::Worker"):
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found
