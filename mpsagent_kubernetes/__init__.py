"""The device plugin of Kubernetes: a client of the API like the command line, in a process of its own."""
