"""Disorder: many clients of several users who start, kill, stop, fault and crowd, and what they were given."""
