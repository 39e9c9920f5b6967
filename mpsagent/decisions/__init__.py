"""Floor 1: what should be done about it. Pure: state, policy and time in, actions out."""
