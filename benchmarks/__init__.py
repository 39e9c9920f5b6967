"""Printed figures, each beside its aim and beside something else measured in the same run. Never a timed test."""
