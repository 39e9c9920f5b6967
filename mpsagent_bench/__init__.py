"""Benchmarks of the ways of sharing a GPU on this node: workloads, their processes, plans and figures.

They run in separate namespaces and do not touch the agent of the node.
"""

VERBS = {"bench": "mpsagent_bench.cli"}
"""The verbs that this package adds to mpsagent-cli, and the module of each."""
