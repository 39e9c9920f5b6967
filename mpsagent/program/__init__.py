"""The roof: the program ``mpsagent``, where the agent and its API are put together."""
