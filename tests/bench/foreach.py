"""Times PyTorch's torch._foreach_add_ and torch._foreach_copy_ on the tensors that `cargo xtask perf --tensors` accumulates and casts.

Needs PyTorch and an NVIDIA GPU; part of no test. bf16 gradients are added to f32 sums, and f32 weights copied to bf16 ones, each tensor
allocated on its own:

    python3 tests/bench/foreach.py resnet50 bert-large
    cargo xtask perf --tensors resnet50 --backend cuda

Two forms of the sum are timed: _foreach_add_ with bf16 operands as they are, and with operands cast to f32 first, as many training loops do.
Prints the median and the 99th percentile in µs, GB/s of the bytes that must move, and device-to-device copies of as many bytes.
"""

import argparse
import statistics
import sys

WARM_UPS = 5
ITERATIONS = 20


def resnet50():
    """The 161 tensors of ResNet-50, by number of elements."""
    lens = [3 * 64 * 49, 64, 64]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            lens += [channels * width, width, width]
            lens += [width * width * 9, width, width]
            lens += [width * width * 4, 4 * width, 4 * width]
            if block == 0:
                lens += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return lens + [2048 * 1000, 1000]


def bert_large():
    """The 398 tensors of BERT-large with the heads of its pre-training."""
    width, words = 1024, 30522
    lens = [words * width, 512 * width, 2 * width, width, width]
    for _ in range(24):
        lens += [width * width, width] * 4 + [width, width]
        lens += [4 * width * width, 4 * width, 4 * width * width, width, width, width]
    return lens + [width * width, width, words, width * width, width, width, width, 2 * width, 2]


MODELS = {"resnet50": (resnet50, 161, 25_557_032), "bert-large": (bert_large, 398, 336_226_108)}


def measure(torch, call):
    """Seconds of each iteration, between events on the stream, behind a call of its own kind as `perf` has it."""
    times = []
    for iteration in range(WARM_UPS + ITERATIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        if iteration >= WARM_UPS:
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)


def line(name, times, moved):
    median, p99 = statistics.median_low(times), times[-1]
    print(f"{name:<44} {median * 1e6:>10.1f} {p99 * 1e6:>10.1f} {moved / median / 1e9:>10.1f}")


def run(torch, name):
    make, count, elements = MODELS[name]
    lens = make()
    assert (len(lens), sum(lens)) == (count, elements), f"{name}: {len(lens)} tensors, {sum(lens)} elements"
    sums = [torch.ones(length, dtype=torch.float32, device="cuda") for length in lens]
    values = [torch.ones(length, dtype=torch.bfloat16, device="cuda") for length in lens]
    added, copied = 10 * elements, 6 * elements
    source = torch.ones(added // 8, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)

    def copy(moved):
        part = moved // 8
        return measure(torch, lambda: target[:part].copy_(source[:part]))

    print(f"\n# {name}: {count} tensors, {elements} elements")
    print(f"{'call':<44} {'median us':>10} {'p99 us':>10} {'GB/s':>10}")
    line("copy that moves as many bytes as the sum", copy(added), added)
    line("_foreach_add_(f32, bf16)", measure(torch, lambda: torch._foreach_add_(sums, values)), added)
    cast = lambda: torch._foreach_add_(sums, [value.float() for value in values])
    line("_foreach_add_(f32, bf16 cast one by one)", measure(torch, cast), added)
    line("copy that moves as many bytes as the cast", copy(copied), copied)
    line("_foreach_copy_(bf16, f32)", measure(torch, lambda: torch._foreach_copy_(values, sums)), copied)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"this needs PyTorch: {error}")
    if not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU, and PyTorch finds none")
    print(f"# PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name in arguments.models:
        run(torch, name)


if __name__ == "__main__":
    main()
