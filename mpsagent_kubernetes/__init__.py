"""The device plugin of Kubernetes: a separate process and a client of the API, like the command line."""
