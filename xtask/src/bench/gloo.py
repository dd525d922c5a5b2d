"""One rank of PyTorch's all-reduce over Gloo: `gloo.py ITERATIONS BYTES...`, with torchrun's variables.

Rank 0 prints the bytes and the seconds of each size: the median of the slowest rank's times, each after a barrier, as `cargo xtask perf` takes them.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

WARM_UPS = 5


def seconds(tensor):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - start


def main():
    iterations, sizes = int(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    dist.init_process_group("gloo")
    for size in sizes:
        tensor = torch.zeros(size // 4, dtype=torch.float32)
        times = [seconds(tensor) for _ in range(WARM_UPS + iterations)][WARM_UPS:]
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(size, statistics.median(slowest.tolist()), flush=True)
    dist.destroy_process_group()


main()
