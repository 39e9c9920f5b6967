"""What sharing a GPU is worth on this node: workloads, their processes, the ways of sharing, and figures.

It stands apart from the agent that runs on the node: what it measures runs in namespaces of its own.
"""

VERBS = {"bench": "mpsagent_bench.cli"}
"""The verbs that this package adds to mpsagent-cli, and the module of each."""
