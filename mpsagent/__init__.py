"""mpsagent makes NVIDIA MPS safe to leave running on a node that several people share."""

__version__ = "0.1.0"
