"""A stand-in for nvidia-cuda-mps-control, its servers and its clients. Knows nothing of the agent but the units."""
