"""GPT: an ordered list of layers that pass one hidden tensor (b, s, h)."""
