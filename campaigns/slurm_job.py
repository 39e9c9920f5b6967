#!/usr/bin/env python3
"""What a job of slurm_day.py does with PyTorch: `slurm_job.py SECONDS`.

Says in the words of cuda_client.py how much it sees, asks for more memory than is free, and multiplies matrices until
its time is over.
"""

import os
import sys
import time

MIB = 1 << 20


def main():
    import torch

    torch.cuda.init()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    free, _ = torch.cuda.mem_get_info()
    print(f"[{os.getpid()}] sms {multiprocessors} meminfo CUDA_SUCCESS free {free // MIB} MiB", flush=True)
    try:
        torch.empty(free + 1024 * MIB, dtype=torch.uint8, device="cuda")
        print("more GIVEN", flush=True)
    except torch.OutOfMemoryError:
        print("more OUT_OF_MEMORY", flush=True)
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end, products = time.monotonic() + float(sys.argv[1]), 0
    while products == 0 or time.monotonic() < end:
        for _ in range(8):
            one @ one
        torch.cuda.synchronize()
        products += 8
        if products == 8:
            print("works", flush=True)
    print(f"products {products}", flush=True)


if __name__ == "__main__":
    main()
