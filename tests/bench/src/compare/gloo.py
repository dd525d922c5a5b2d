"""One rank of PyTorch's all-reduce over Gloo: `gloo.py BYTES WARM_UPS ITERATIONS`, with torchrun's variables.

Rank 0 prints one JSON object: the slowest rank's times, each after a barrier, as `cargo xtask perf` takes them.
"""

import json
import sys
import time

import torch
import torch.distributed as dist


def seconds(tensor):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - start


def main():
    size, warm_ups, iterations = (int(word) for word in sys.argv[1:])
    dist.init_process_group("gloo")
    tensor = torch.zeros(size // 4, dtype=torch.float32)
    times = [seconds(tensor) for _ in range(warm_ups + iterations)][warm_ups:]
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    ranks = dist.get_world_size()
    wrong = torch.tensor(int((tensor != ranks * (ranks + 1) // 2).sum()))
    dist.all_reduce(wrong)
    if dist.get_rank() == 0:
        times_us = [second * 1e6 for second in slowest.tolist()]
        print(json.dumps({"by": f"PyTorch {torch.__version__}", "times_us": times_us, "wrong": int(wrong)}), flush=True)
    dist.destroy_process_group()


main()
