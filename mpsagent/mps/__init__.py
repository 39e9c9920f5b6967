"""What NVIDIA's programs say and want to hear: log lines, front-end commands and answers, rendezvous messages. Pure."""
