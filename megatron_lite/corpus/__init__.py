"""From text to token files: inputs, documents, pieces of work that survive a kill, and the pair
that they become."""
