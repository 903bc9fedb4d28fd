"""Text out of a model: reading it for one process, continuing prompts token by token, and the loss of given tokens."""
