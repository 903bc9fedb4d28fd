"""Turn a command line into a configuration. Imports no torch."""
