"""Small trainings whose memory is advised on: a transformer and an MLP, on one rank."""

from __future__ import annotations

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("mlp", "transformer"), required=True)
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--width", type=int)
parser.add_argument("--depth", type=int)
options = parser.parse_args()
torch.manual_seed(1)
if options.model == "transformer":
    width, depth = options.width or 128, options.depth or 4
    shape: tuple[int, ...] = (options.batch_size, 64, width)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, depth)
else:
    width, depth = options.width or 512, options.depth or 6
    shape = (options.batch_size, width)
    pairs = ((nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(options.steps):
    optimizer.zero_grad()
    loss = model(torch.randn(shape)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
