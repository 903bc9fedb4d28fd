"""Generate text from a model: load it into one process, continue prompts token by token, measure
the loss of given text."""
