"""Process groups, collectives, and agreement among ranks."""
