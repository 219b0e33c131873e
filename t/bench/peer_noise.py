"""Who else uses the processors: waits for an idle second, and tells of each
run what others took meanwhile."""

import os
import resource
import time

LIMIT_CORES = 0.2
TICKS = os.sysconf("SC_CLK_TCK")
CPUS = len(os.sched_getaffinity(0))


def system_seconds():
    """(busy, stolen by the host) of all processors since the start."""
    with open("/proc/stat", encoding="ascii") as f:
        n = [int(word) for word in f.readline().split()[1:9]]
    return (n[0] + n[1] + n[2] + n[5] + n[6]) / TICKS, n[7] / TICKS


def process_seconds(pids):
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii",
                      errors="replace") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_idle(patience_s=60):
    """True after a second in which nobody used the processors."""
    end = time.monotonic() + patience_s
    while True:
        before = system_seconds()[0]
        start = time.monotonic()
        time.sleep(1)
        busy = (system_seconds()[0] - before) / (time.monotonic() - start)
        if busy < LIMIT_CORES:
            return True
        if time.monotonic() > end:
            return False


class Watch:
    """with Watch(pids of the server) as used: …; then used.result.

    Programs that were started and waited for meanwhile count as the server;
    client_share is this process's part of the whole machine."""

    def __init__(self, pids):
        self.pids = pids
        self.result = None

    def _now(self):
        busy, stolen = system_seconds()
        return (time.monotonic(), busy, stolen, time.process_time(),
                process_seconds(self.pids) + children_seconds())

    def __enter__(self):
        self.before = self._now()
        return self

    def __exit__(self, *_):
        wall, busy, stolen, client, server = (
            b - a for a, b in zip(self.before, self._now()))
        wall = max(wall, 1e-6)
        self.result = {
            "wall_s": wall,
            "other_cores": max(0.0, busy - client - server) / wall,
            "stolen_cores": stolen / wall,
            "server_cores": server / wall,
            "client_share": client / wall / CPUS}
