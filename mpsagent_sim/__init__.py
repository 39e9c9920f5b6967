"""A stand-in for NVIDIA MPS: control daemon, servers, CUDA clients as real processes (`mpsagent-sim --help`)."""
