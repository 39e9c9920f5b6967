"""What people type: mpsagent-cli, with what it draws and what it reads from old logs."""
