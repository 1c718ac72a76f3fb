"""The workloads in PyTorch, under `torch.autocast` and `torch.compile`, on the same device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet version 1."""

    def __init__(self, inputs: int, features: int, stride: int):
        super().__init__()

        def conv(a: int, b: int, kernel: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(b))

        self.first, self.second = conv(inputs, features, 1, stride), conv(features, features, 3)
        self.third = conv(features, 4 * features, 1)
        nn.init.zeros_(self.third[1].weight)
        self.shortcut = conv(inputs, 4 * features, 1, stride) if stride > 1 or inputs != 4 * features else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.second(F.relu(self.first(x))))
        return F.relu(self.shortcut(x) + self.third(h))


def resnet50(width: int) -> nn.Module:
    """Returns a ResNet-50 in the layout that tensor cores like."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and i == 0 else 1))
            inputs = 4 * width * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return model.to(memory_format=torch.channels_last)


class LSTM(nn.Module):
    """Two LSTM layers and a softmax over the vocabulary."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with a vocabulary shared by the first layer and the last."""

    def __init__(self, width: int, layers: int, vocabulary: int, length: int):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


@dataclass
class TorchProgram:
    """A train step in PyTorch, with the attributes of `benchmarks.steptime.programs.Program` that it can tell."""

    step: Callable[[], Any]
    device: str
    healthy: Callable[[], bool]
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)

    def run(self, steps: int = 1) -> None:
        """Does some steps and waits for the last."""
        for _ in range(steps):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()


def torch_program(workload: Any, dtype: str, full: bool, device: str) -> TorchProgram:
    """Builds a workload under `torch.autocast` in `dtype`, compiles it, and measures its peak memory.

    Args:
        workload: The workload of `benchmarks.steptime.workloads`, for its name and batch.
        dtype: "bfloat16" or "float16"; the latter with a `GradScaler`.
        full: Whether at the published sizes.
        device: "cuda" or "cpu".

    Returns:
        The program, warm.
    """
    model, optimizer, inputs, loss_of = _BUILDERS[workload.name](workload.batch, full, device)
    model = model.to(device)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")

    @torch.compile  # The loss too, as JAX does. The optimizers below are fused kernels of PyTorch's own.
    def forward() -> torch.Tensor:
        return loss_of(model(inputs[0]), *inputs)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, getattr(torch, dtype)):
            loss = forward()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    result = TorchProgram(step, device, lambda: all(bool(p.isfinite().all()) for p in model.parameters()))
    result.run()  # compiles
    if device == "cuda":
        optimizer.zero_grad(set_to_none=True)  # Gradients belong to what the step needs.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result.run()
        own = sum(p.nbytes for p in model.parameters()) + sum(x.nbytes for x in inputs)
        own += sum(x.nbytes for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x))
        result.peak_bytes = torch.cuda.max_memory_allocated() - before + own
    return result


def _simple_net(batch: int, full: bool, device: str) -> tuple:
    size = 4096 if full else 512
    layers = [nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)]
    model = nn.Sequential(*layers).to(device)
    inputs = (torch.randn(batch, size, device=device), torch.randn(batch, size, device=device))
    return model, torch.optim.SGD(model.parameters(), 1e-4), inputs, lambda out, x, y: F.mse_loss(out, y)


def _resnet50(batch: int, full: bool, device: str) -> tuple:
    width, image = (64, 224) if full else (8, 32)
    model = resnet50(width).to(device)
    x = torch.randn(batch, 3, image, image, device=device).to(memory_format=torch.channels_last)
    y = torch.arange(batch, device=device) % 1000
    return model, torch.optim.SGD(model.parameters(), 0.01, 0.9), (x, y), lambda out, x, y: F.cross_entropy(out, y)


def _next_word(logits: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _words(batch: int, length: int, vocabulary: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(vocabulary, (batch, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _lstm(batch: int, full: bool, device: str) -> tuple:
    width, vocabulary, length = (1024, 10_000, 64) if full else (64, 256, 16)
    model = LSTM(width, vocabulary).to(device)
    return model, torch.optim.Adam(model.parameters(), 1e-3), _words(batch, length, vocabulary, device), _next_word


def _gpt(batch: int, full: bool, device: str) -> tuple:
    width, layers, vocabulary, length = (768, 12, 50_304, 1024) if full else (64, 2, 256, 64)
    model = GPT(width, layers, vocabulary, length).to(device)
    return model, torch.optim.AdamW(model.parameters(), 3e-4), _words(batch, length, vocabulary, device), _next_word


_BUILDERS = {"SimpleNet": _simple_net, "ResNet-50": _resnet50, "LSTM": _lstm, "GPT": _gpt, "GPT, scanned": _gpt}
