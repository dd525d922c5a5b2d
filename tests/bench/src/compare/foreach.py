"""Times PyTorch's sum, cast or AdamW of many tensors on a GPU: `foreach.py accumulate|cast|adamw_step WARM_UPS ITERATIONS LEN...`.

bf16 gradients are added to f32 sums by torch._foreach_add_, or f32 weights copied to bf16 ones by torch._foreach_copy_. A step of AdamW copies bf16
gradients to f32, clips them, runs the fused optimizer and copies the weights to bf16. Each tensor is allocated on its own. Prints one JSON object. Each timed call is behind an identical one, as `cargo xtask perf` has it.
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


def adamw_step(wide, narrow):
    """The bf16 weights, their values after the first step, and the step: a gradient of one sign moves a weight by the rate."""
    rate = 0.5
    weights = [torch.nn.Parameter(tensor) for tensor in wide]
    results = [torch.zeros_like(tensor) for tensor in narrow]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights]
    optimizers = []

    def call():
        if not optimizers:
            optimizers.append(torch.optim.AdamW(weights, lr=rate, fused=True))
        torch._foreach_copy_(gradients, narrow)
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizers[0].step()
        with torch.no_grad():
            torch._foreach_copy_(results, [weight.detach() for weight in weights])

    return results, -rate, (call, optimizers.clear)


def main():
    operation, (warm_ups, iterations, *lens) = sys.argv[1], [int(word) for word in sys.argv[2:]]
    wide = [torch.zeros(length, dtype=torch.float32, device="cuda") for length in lens]
    narrow = [torch.ones(length, dtype=torch.bfloat16, device="cuda") for length in lens]
    forget = lambda: None
    if operation == "accumulate":
        results, expected, call = wide, 1, lambda: torch._foreach_add_(wide, narrow)
    elif operation == "adamw_step":
        results, expected, (call, forget) = adamw_step(wide, narrow)
    else:
        results, expected, call = narrow, 0, lambda: torch._foreach_copy_(narrow, wide)
    times_us = [microseconds(call) for _ in range(warm_ups + iterations)][warm_ups:]
    for tensor in wide:
        tensor.zero_()
    forget()
    call()
    wrong = sum(int(((tensor.float() - expected).abs() > 1e-2).sum()) for tensor in results)
    by = f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}"
    print(json.dumps({"by": by, "times_us": times_us, "wrong": wrong}))


main()
