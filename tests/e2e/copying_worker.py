"""`swift_r1.cli.rank` for which `.cpu()` gives a copy, as it does on a GPU: torch does not let memory go that
numpy has been shown."""

import sys

import torch

from swift_r1.cli import rank

torch.Tensor.cpu = lambda self: self.to("cpu", copy=True)

if __name__ == "__main__":
    sys.exit(rank.main(sys.argv[1:]))
