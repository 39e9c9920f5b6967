"""Floor 2: one effector for each thing outside. They do what an action says and report events; they decide nothing."""
