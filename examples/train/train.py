"""A language model of bytes, trained on texts by plain torch under DDP; zero.diff makes it a ZeRO stage in three lines.

    torchrun --nproc-per-node=2 examples/train/train.py README.md docs/*/*.md
    patch --output=train_zero.py examples/train/train.py examples/train/zero.diff
    torchrun --nproc-per-node=2 train_zero.py README.md docs/*/*.md

The diff says zero3; zero1 and zero2 are the same three lines.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, LAYERS, HEADS = 128, 128, 4, 4
BATCH, MICRO_BATCHES = 8, 2  # windows of text for each rank, and micro-batches of a step


class ByteModel(nn.Module):
    """Blocks of attention with a causal mask over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of the next bytes. `windows`: (batch, CONTEXT + 1), int64."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        hidden = self.bytes(inputs) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=windows.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def windows_of(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns random windows of `text`, (BATCH, CONTEXT + 1), int64."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def train(text: torch.Tensor, steps: int, device: torch.device) -> tuple[list[float], float]:
    """Returns the loss of each step on this rank, and of the last tenth of `text`, bytes (n,) as uint8."""
    torch.manual_seed(0)  # equal weights on every rank
    model = ByteModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model = DistributedDataParallel(model)
    learned, held_out = text.tensor_split([len(text) * 9 // 10])
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(windows_of(learned, generator).to(device)) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total.item())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    model.eval()
    with torch.no_grad():
        last = model(windows_of(held_out, torch.Generator().manual_seed(0)).to(device)).item()
    return losses, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="texts to learn, of a few thousand bytes together")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in arguments.files)), dtype=torch.uint8)
    _, loss = train(text, arguments.steps, device)
    if dist.get_rank() == 0:
        print(f"held-out loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
