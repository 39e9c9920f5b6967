"""Floor 0: what MPS says and what is so. Pure: no clock, no I/O, no logging, no third-party import."""
