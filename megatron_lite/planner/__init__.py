"""What a run will need, before it runs: memory, communication, and the options chosen from them."""
