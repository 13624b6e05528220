"""What becomes of a fork that drops a gloo process group it has inherited: python
gloo_group_in_fork.py (Linux).
"""

import os
import signal
import sys
import threading
import time
from collections import Counter

import torch
import torch.distributed as dist

TRIES = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def start_threads(seconds):
    """Eight threads that end after so long."""
    threads = [threading.Thread(target=time.sleep, args=(seconds,), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    return threads


def fork(action, works):
    """How a fork ends that does this with an inherited group which has done some work."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(works):
        dist.all_reduce(torch.ones(1))
    groups = [dist.group.WORLD]
    dist.destroy_process_group()  # `groups` alone holds it now
    child = os.fork()
    if child == 0:
        signal.alarm(3)
        action(groups)
        for thread in start_threads(0.01):
            thread.join()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    groups.clear()
    return {0: "ends", -signal.SIGALRM: "hangs"}.get(code) or signal.Signals(-code).name


def drop_after_threads(groups):
    """Threads of the fork get the stacks that those of the group had."""
    for thread in start_threads(0.01):
        thread.join()
    groups.clear()


def drop_among_threads(groups):
    start_threads(0.5)
    groups.clear()


print("torch", torch.__version__)
for name, action in {
    "keeps it": lambda groups: None,
    "drops it": lambda groups: groups.clear(),
    "drops it after some threads": drop_after_threads,
    "drops it among some threads": drop_among_threads,
}.items():
    for works in (0, 4):
        ends = Counter(fork(action, works) for _ in range(TRIES))
        print(
            f"{name:28} {works} all-reduces before:"
            f" {', '.join(f'{n} {what}' for what, n in sorted(ends.items()))}"
        )
