"""Analysis of logs and history: replay, timeline, advice, and the trial of another policy."""

VERBS = {
    "policy advise": "mpsagent_tools.advise",
    "replay": "mpsagent_tools.replay",
    "timeline": "mpsagent_tools.timeline",
}
"""The verbs that this package adds to mpsagent-cli, and the module of each."""
