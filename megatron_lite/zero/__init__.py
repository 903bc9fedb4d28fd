"""ZeRO stages 1, 2 and 3 over stages of layers (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054)."""
