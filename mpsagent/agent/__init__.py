"""The loop: events from gate, logs, systemd and policy into the core; its actions out to the effectors."""
