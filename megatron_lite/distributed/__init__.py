"""Process groups and everything that ranks exchange or agree on."""
