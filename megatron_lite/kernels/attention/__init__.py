"""Scaled dot-product attention: the blockwise formula, CPU and GPU kernels, and the choice among
them."""
