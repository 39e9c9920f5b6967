"""Floor 3: the event loop that joins facts, decisions and hands; the mpsagent program."""
