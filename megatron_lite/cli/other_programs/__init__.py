"""The flags of other programs, one table for each program: what to write instead, or why there is nothing."""
