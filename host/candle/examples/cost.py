"""The GPT of host/candle/examples/gpt.rs in PyTorch: a step with and without DistributedDataParallel, in turns."""
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

W, D, H, B, S, BLOCKS = 32, 64, 4, 8, 20, 11


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.n1, s.n2 = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        s.qkv, s.attention, s.up, s.down = nn.Linear(D, 3*D), nn.Linear(D, D), nn.Linear(D, 4*D), nn.Linear(4*D, D)
    def forward(s, x, later):
        n = x.shape[0]
        q, k, v = s.qkv(s.n1(x)).reshape(n, W, 3, H, D//H).permute(2, 0, 3, 1, 4)
        seen = F.softmax(q @ k.transpose(-1, -2) / (D//H)**0.5 + later, -1) @ v
        x = x + s.attention(seen.transpose(1, 2).reshape(n, W, D))
        return x + s.down(F.gelu(s.up(s.n2(x))))
class Gpt(nn.Module):
    def __init__(s):
        super().__init__()
        s.bytes, s.places = nn.Embedding(256, D), nn.Parameter(torch.randn(W, D) * 0.1)
        s.blocks, s.scores = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, 256)
        s.register_buffer("later", torch.triu(torch.full((W, W), -1e9), 1))
    def forward(s, t):
        x = s.bytes(t[:, :-1]) + s.places
        for b in s.blocks:
            x = b(x, s.later)
        return F.cross_entropy(s.scores(x).reshape(-1, 256), t[:, 1:].reshape(-1))
dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:29511")
torch.manual_seed(0)
t = torch.randint(0, 256, (B, W + 1), device="cuda")
plain = Gpt().cuda()
ddp = nn.parallel.DistributedDataParallel(Gpt().cuda(), device_ids=[0])
opts = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (plain, ddp)]
times = [[], []]
for block in range(BLOCKS + 1):
    for kind, model in enumerate((plain, ddp)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(S):
            opts[kind].zero_grad()
            model(t).backward()
            opts[kind].step()
        torch.cuda.synchronize()
        times[kind].append((time.perf_counter() - begun) / S * 1e3)
a, b = (statistics.median(x[1:]) for x in times)
print(f"PyTorch {torch.__version__}: a step takes {a:.3f} ms without DDP, {b:.3f} ms with it ({b/a:.3f})")
dist.destroy_process_group()
