"""What is known and what should be done: model, one reducer, one engine, rules. Pure: no clock, no I/O."""
