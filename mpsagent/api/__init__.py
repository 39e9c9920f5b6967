"""What the process mpsagent-api does: it shows people and programs what the agent says, and keeps the history."""
