"""The report of a CPU: whole programs and bare steps, with all instruction sets and with AVX2, in
one file."""
