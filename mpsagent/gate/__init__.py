"""The gate: owns the public control socket, holds clients, and hands them over to the hidden daemon with limits set."""
