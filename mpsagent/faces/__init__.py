"""Floor 4: how people and programs see the agent: the socket API, the command line, the story of a log."""
