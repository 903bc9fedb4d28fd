"""Pure functions of the iteration: learning rate, cycles, stages and batch size. Imports no
torch."""
