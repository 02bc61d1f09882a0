"""A plugin with a thread that is at work in C++ when the trainer ends."""

import atexit
import sys
import threading

import torch

at_work = threading.Event()


def work() -> None:
    block = torch.ones(600, 600)
    while True:
        block @ block
        at_work.set()


@atexit.register
def start() -> None:
    threading.Thread(target=work, daemon=True).start()
    at_work.wait()
    print("at work", file=sys.stderr, flush=True)
