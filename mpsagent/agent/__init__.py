"""Floor 3: the loop that joins the hands: event, reduce, decide, dispatch."""
