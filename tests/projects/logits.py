"""A small language model whose loss is logged."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import zerobench

VOCABULARY, WIDTH = 512, 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.body(self.embedding(tokens)).relu()
        return self.head(hidden)


def train(to):
    torch.manual_seed(0)
    model, log = Model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with zerobench.watch(model, optimizer, to=to, name="logits") as watch:
        for _ in range(4):
            tokens = torch.randint(VOCABULARY, (8, 16))
            logits = model(tokens)
            loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append(loss.item())
    return watch
