"""What sharing a GPU is worth on this node: workloads, their processes, the ways of sharing, and figures.

It stands apart from the agent that runs on the node: what it measures runs in namespaces of its own.
"""
