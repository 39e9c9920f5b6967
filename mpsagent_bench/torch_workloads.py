"""Typical PyTorch workloads: ResNet-50 with one image and with batches, and a training of MNIST's size.

The benchmark imports only `TORCH`. A Python that has PyTorch runs the rest. It may be another Python and run as another
user, who cannot read these files: it gets the text of this module and a workload's name. It writes a line of JSON when
it is ready. For each line on its standard input it carries out a step and writes a line. If it fails, its last line is
`{"error": …}`.
"""

# mypy: ignore-errors

import json
import os
import sys

TORCH = {
    "resnet": ("images", "ResNet-50 in half precision, one image at a time (PyTorch)"),
    "resnet16": ("batches", "ResNet-50 in half precision, batches of 16 images (PyTorch)"),
    "mnist": ("steps", "a small network learns images of 28x28 in batches of 64, as with MNIST (PyTorch)"),
}
"""Units and words by name."""


def resnet(batch):
    """Return a step that classifies `batch` images. Random weights take the same time as trained ones."""
    import torch
    from torch import nn
    from torch.nn import functional

    def unit(inside, outside, size, stride=1):
        convolution = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outside))

    class Bottleneck(nn.Module):
        def __init__(self, inside, middle, stride):
            super().__init__()
            self.first, self.second = unit(inside, middle, 1), unit(middle, middle, 3, stride)
            self.third = unit(middle, middle * 4, 1)
            same = stride == 1 and inside == middle * 4
            self.past = nn.Identity() if same else unit(inside, middle * 4, 1, stride)

        def forward(self, x):
            y = functional.relu(self.first(x))
            y = functional.relu(self.second(y))
            return functional.relu(self.third(y) + self.past(x))

    layers = [unit(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inside, middle, stride if number == 0 else 1))
            inside = middle * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    model = nn.Sequential(*layers).to("cuda", torch.float16).eval()
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.float16)

    def step():
        with torch.inference_mode():
            model(images).argmax(1).tolist()  # waits for the result, as who asks for a picture's class does

    return step


def mnist():
    """Return a step of training (forward, backward, descent) with 64 random images that are on the GPU."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to("cuda")  # fmt: skip
    images = torch.randn(1024, 1, 28, 28, device="cuda")
    labels = torch.randint(10, (1024,), device="cuda")
    descent = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    done = 0

    def step():
        nonlocal done
        some = slice(done % 16 * 64, done % 16 * 64 + 64)
        done += 1
        descent.zero_grad()
        loss = loss_of(model(images[some]), labels[some])
        loss.backward()
        descent.step()
        loss.item()  # waits for it

    return step


def main(name):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is not an answer

    def say(line):
        answers.write(line + "\n")
        answers.flush()

    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        step = mnist() if name == "mnist" else resnet(16 if name == "resnet16" else 1)
        step()
        about = torch.cuda.get_device_properties(0)
        say(json.dumps({"gpu": about.name, "multiprocessors": about.multi_processor_count}))
        for _ in sys.stdin:
            step()
            say("done")
    except Exception as error:
        # CUDA's errors have more lines, with advice for programmers.
        say(json.dumps({"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
