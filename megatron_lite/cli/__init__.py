"""From the words of a command line to a configuration. Imports no torch."""
