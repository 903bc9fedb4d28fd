"""Turn text into token files: inputs, documents, pieces of work that survive a kill, and the
resulting pair."""
