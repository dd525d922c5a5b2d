"""Makes 100 steps of PyTorch's optimizers in float64, as optimizer_bounds.rs has them, and prints the weights as JSON.

Run it to record other numbers: `python3 torch_steps.py > torch_steps.json`.
"""

import json

import torch

LENGTHS = [7, 3]
STEPS = 100
CASES = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd with momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "sgd with nesterov": (torch.optim.SGD, dict(lr=0.05, momentum=0.8, weight_decay=0.1, nesterov=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)),
    "adamw with decay": (torch.optim.AdamW, dict(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
}


def number(index, step):
    """From -1/2 to 1/2, exact in float64, the same in every language."""
    return ((index * 2654435761 + step * 2246822519 + 374761393) % 2**32) / 2**32 - 0.5


def train(make, options, max_norm):
    begins = [sum(LENGTHS[:tensor]) for tensor in range(len(LENGTHS))]
    weights = [
        torch.tensor([4 * number(begin + i, 0) for i in range(length)], dtype=torch.float64)
        for begin, length in zip(begins, LENGTHS)
    ]
    optimizer = make(weights, **options)
    for step in range(1, STEPS + 1):
        for weight, begin in zip(weights, begins):
            values = [number(begin + i, step) * 2.0 ** (step % 6 - 3) for i in range(len(weight))]
            weight.grad = torch.tensor(values, dtype=torch.float64)
        if max_norm is not None:
            # PyTorch adds 1e-6 to the norm; the limit is raised by as much, so that the factor is max_norm / norm.
            norm = torch.linalg.vector_norm(torch.cat([weight.grad for weight in weights]))
            torch.nn.utils.clip_grad_norm_(weights, float(max_norm * (norm + 1e-6) / norm))
        optimizer.step()
    return [float(value) for weight in weights for value in weight]


def main():
    results = {name: [train(*case, max_norm) for max_norm in (None, 1.0)] for name, case in CASES.items()}
    print(json.dumps({"by": f"PyTorch {torch.__version__}", "weights": results}, indent=1))


main()
