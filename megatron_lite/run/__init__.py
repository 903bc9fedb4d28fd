"""One start of the program: directory, launcher environment, exit status, stop signals, durable
files, secrets."""
