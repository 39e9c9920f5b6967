"""One effector for each thing outside. They do what an action says and report; they decide nothing."""
