"""Times PyTorch's sum or cast of many tensors on a GPU: `foreach.py accumulate|cast WARM_UPS ITERATIONS LEN...`.

bf16 gradients are added to f32 sums by torch._foreach_add_, or f32 weights copied to bf16 ones by torch._foreach_copy_; each tensor is allocated on
its own. Prints one JSON object. Each timed call is behind an identical one, as `cargo xtask perf` has it.
"""

import json
import sys

import torch


def microseconds(call):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def main():
    operation, (warm_ups, iterations, *lens) = sys.argv[1], [int(word) for word in sys.argv[2:]]
    wide = [torch.zeros(length, dtype=torch.float32, device="cuda") for length in lens]
    narrow = [torch.ones(length, dtype=torch.bfloat16, device="cuda") for length in lens]
    if operation == "accumulate":
        results, expected, call = wide, 1, lambda: torch._foreach_add_(wide, narrow)
    else:
        results, expected, call = narrow, 0, lambda: torch._foreach_copy_(narrow, wide)
    times_us = [microseconds(call) for _ in range(warm_ups + iterations)][warm_ups:]
    for tensor in wide:
        tensor.zero_()
    call()
    wrong = sum(int((tensor != expected).sum()) for tensor in results)
    by = f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}"
    print(json.dumps({"by": by, "times_us": times_us, "wrong": wrong}))


main()
