"""The layers of a GPT. Shapes: b micro-batch, s sequence, h hidden, n heads, g head groups, d head, f ffn, v vocabulary."""
