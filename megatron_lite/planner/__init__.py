"""Memory and communication of a run, predicted before it starts, and options chosen from them."""
