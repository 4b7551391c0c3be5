"""Small trainings whose memory is advised on: a transformer and an MLP, on one rank."""

from __future__ import annotations

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("mlp", "transformer"), required=True)
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()
torch.manual_seed(1)
shape: tuple[int, ...] = (options.batch_size, 512)
model: nn.Module = nn.Sequential(
    *(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU()))
)
if options.model == "transformer":
    shape = (options.batch_size, 64, 128)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 4)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(options.steps):
    optimizer.zero_grad()
    loss = model(torch.randn(shape)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
