"""What the processes of mpsagent say to each other: each message is declared once, and one codec checks it. Pure."""
