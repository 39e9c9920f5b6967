"""What holds (the model), how events change it (one reducer), what follows (rules). Pure: no clock, no I/O."""
