"""Linux itself: sockets, peers, descriptors, processes, files and locks. Every room may use it, and it uses none."""
