"""A stand-in for NVIDIA MPS: control daemon, servers and CUDA clients as real processes. See `mpsagent-sim describe`."""
