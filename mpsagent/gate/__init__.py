"""The gate: owns the public control socket, holds who knocks, and hands over to the hidden daemon with limits set."""
