"""Hosts on this machine: network namespaces on a virtual switch. Tests can pull their cables.

Host 0 has the driver and a network of its own. Each other host has an interface to host 0 (eth2),
one to the other hosts (eth0), and one that leads nowhere (eth1). Each host resolves its own name to
127.0.0.1. All share the file system. This needs root, `ip` (iproute2), and `unshare` (util-linux).
It changes nothing outside the namespaces.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.conftest import wait_until

PORT = 6380
START_S, START_TRIES = 60.0, 3
NAMED = 'echo $0 > /proc/sys/kernel/hostname && mount --bind $1 /etc/hosts && shift && exec "$@"'
_numbers = iter(range(100))


def why_not():
    """Return why this machine cannot run such hosts, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if None in (shutil.which("ip"), shutil.which("unshare")):
        return "network namespaces need iproute2 and util-linux"
    name = f"rs{os.getpid()}try"
    tried = _ip("netns", "add", name, check=False)
    _ip("netns", "del", name, check=False)
    return f"there can be no network namespaces: {tried.stderr}" if tried.returncode else None


def _ip(*words, namespace=None, check=True):
    where = ("-n", namespace) if namespace else ()
    done = subprocess.run(["ip", *where, *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done


class Hosts:
    """Hosts with a Ray cluster. Host 0 has the driver and the Ray head.

    Args:
        cpus: number of CPUs that Ray uses on each host.
        keeps_tables: whether the Ray head stores its tables in files, so that it can restart.
    """

    def __init__(self, cpus, keeps_tables=False):
        self.cpus = cpus
        self._name = f"rs{os.getpid()}n{next(_numbers)}"
        self._heads = []
        self._switch = f"{self._name}sw"
        self.folder = Path(tempfile.mkdtemp(prefix="hosts"))
        self.environment = {
            # A process group of an earlier test in this process may have chosen the loopback.
            **{k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"},
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self.folder),  # otherwise the next test would find this cluster
            "RAY_ADDRESS": f"{self.address(0)}:{PORT}",
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
        }
        if keeps_tables:
            (tables := self.folder / "tables").mkdir()
            self.environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}

    def address(self, host):
        """Return the address of a host in the Ray cluster."""
        return self._cables(host)[-1][2]

    def namespace(self, host):
        return f"{self._name}h{host}"

    def _cables(self, host):
        """Return (name of interface and bridge, port of the bridge, address) for each cable."""
        cables = [("eth2", f"q{host}", f"10.125.0.{host + 1}")]
        return cables + [("eth0", f"p{host}", f"10.123.0.{host + 1}")] * (host > 0)

    def __enter__(self):
        try:
            self._lay_cables()
            for host in range(len(self.cpus)):  # in turn: parallel starts conflict
                self.start_ray(host)
        except BaseException:
            self.close()
            raise
        return self

    def _lay_cables(self):
        _ip("netns", "add", self._switch)
        for switch in ("eth0", "eth2"):
            _ip("link", "add", switch, "type", "bridge", namespace=self._switch)
            _ip("link", "set", switch, "up", namespace=self._switch)
        for host in range(len(self.cpus)):
            inside, cables = self.namespace(host), self._cables(host)
            _ip("netns", "add", inside)
            _ip("link", "set", "lo", "up", namespace=inside)
            for card, plug, address in cables:
                peer = ("peer", "name", plug, "netns", self._switch)
                _ip("link", "add", card, "netns", inside, "type", "veth", *peer)
                _ip("link", "set", plug, "master", card, "up", namespace=self._switch)
                _ip("addr", "add", f"{address}/24", "dev", card, namespace=inside)
                _ip("link", "set", card, "up", namespace=inside)
            if host:
                way = ("via", cables[0][2])
                _ip("route", "add", self.address(host), *way, namespace=self.namespace(0))
            # an interface that leads nowhere and has the same address on each host
            _ip("link", "add", "eth1", "type", "bridge", namespace=inside)
            _ip("addr", "add", "10.124.0.1/24", "dev", "eth1", namespace=inside)
            _ip("link", "set", "eth1", "up", namespace=inside)

    def start_ray(self, host):
        """Start a Ray node on a host."""
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if host:
            role = [f"--address={self.address(0)}:{PORT}"]
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *role, f"--node-ip-address={self.address(host)}"]
        command += [f"--num-cpus={self.cpus[host]}", "--object-store-memory=80000000"]
        command += ["--disable-usage-stats", "--include-log-monitor=false"]
        log = self.folder / f"ray{host}.log"
        for _ in range(START_TRIES):
            with log.open("w") as output:
                started = self.spawn(host, command, stdout=output, stderr=output)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(START_S)
            if "Ray runtime started" in (said := log.read_text()):
                return
            # Ray sometimes does not start, for an unknown reason, or because the machine is busy.
            self._kill_all(host)
            started.wait()
            if not host:  # otherwise the next try believes that a head already runs
                (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        raise AssertionError(f"Ray did not start on host {host} in {START_TRIES} tries: {said}")

    def spawn(self, host, command, **options):
        """Start a process on a host."""
        named = self.folder / f"hosts{host}"
        named.write_text(f"127.0.0.1 localhost host{host}\n")
        inside = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts"]
        inside += ["sh", "-c", NAMED, f"host{host}", str(named)]
        options = {"env": self.environment, "start_new_session": True, **options}
        return subprocess.Popen([*inside, *command], **options)

    def processes(self, host, name=""):
        """Return the processes of a host whose name starts with `name`."""
        found = []
        for pid in _ip("netns", "pids", self.namespace(host), check=False).stdout.split():
            try:
                process = psutil.Process(int(pid))
                if process.name().startswith(name) or name in " ".join(process.cmdline()[:1]):
                    found.append(process)
            except psutil.NoSuchProcess:
                pass
        return found

    def cut(self, host):
        """Pull the cables of a host: packets vanish without an error."""
        self._set_plugs(host, "down")

    def heal(self, host):
        self._set_plugs(host, "up")

    def _set_plugs(self, host, state):
        for _, plug, _ in self._cables(host):
            _ip("link", "set", plug, state, namespace=self._switch)

    def drain(self, host, deadline_s):
        """Make Ray drain the node of a host, like for a preemption notice."""
        (raylet,) = self.processes(host, "raylet")
        (node_id,) = re.findall(r"--node_id=(\w+)", " ".join(raylet.cmdline()))
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "drain-node", f"--node-id={node_id}", "--reason-message=tested"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION"]
        command += [f"--deadline-remaining-seconds={deadline_s}"]
        assert self.spawn(0, command).wait(180) == 0

    def restart_head(self):
        """Kill the Ray head and start it again."""
        (head,) = self.processes(0, "gcs_server")
        command, environment = head.cmdline(), head.environ()
        head.kill()
        wait_until(lambda: not self.processes(0, "gcs_server"))
        self._heads.append(self.spawn(0, command, env=environment))

    def power_off(self, host):
        self.cut(host)
        self._kill_all(host)

    def _kill_all(self, host):
        def none_left():
            for process in (left := self.processes(host)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            return not left

        wait_until(none_left)

    def close(self):
        for host in range(len(self.cpus)):
            self._kill_all(host)
        for head in self._heads:
            head.wait()
        for name in [*map(self.namespace, range(len(self.cpus))), self._switch]:
            _ip("netns", "del", name, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, *_):
        self.close()
