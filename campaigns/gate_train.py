#!/usr/bin/env python3
"""A training that repeats itself bit by bit, for campaigns/gate_pause.py: `gate_train.py STEPS [SECONDS]`.

Prints READY when the first step has been made, and at the end, after STEPS or SECONDS, one line `LOSSES [...]`: that of
every hundredth step.
"""

import json
import sys
import time


def torch_steps():
    import torch

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    ).cuda()  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    pictures = torch.randn(512, 1024, device="cuda")
    labels = torch.randint(0, 10, (512,), device="cuda")
    while True:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimiser.step()
        yield loss


def main():
    steps, losses = int(sys.argv[1]), []
    end = time.monotonic() + float(sys.argv[2]) if len(sys.argv) > 2 else None
    for number, loss in zip(range(steps), torch_steps(), strict=False):
        if number % 100 == 0:
            losses.append(float(loss))
            if end is not None and time.monotonic() > end:
                break
        if number == 0:
            print("READY", flush=True)
    print("LOSSES", json.dumps(losses), flush=True)


if __name__ == "__main__":
    main()
