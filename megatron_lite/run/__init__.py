"""What surrounds one start of the program: its directory, exit status, stop signals, durable files and secrets."""
