"""Scaled dot-product attention: the formula, its blockwise form on CPU, GPU libraries, and the choice among them."""
