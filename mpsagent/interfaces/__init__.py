"""How people and programs see the agent: the socket API, the command line, metrics, replay."""
