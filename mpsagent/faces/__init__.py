"""Floor 4: what people and programs see: the socket API, its client, the command line, replay."""
