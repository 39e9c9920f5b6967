"""The policy language: files to a policy or to all its mistakes; what applies to whom and why. Pure."""
