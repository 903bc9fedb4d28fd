"""Train and look at models from Python, as in a notebook: errors are exceptions, and nothing stays
behind in the process."""
