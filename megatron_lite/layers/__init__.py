"""The layers of a GPT.

Shapes: b micro-batch, s sequence, h hidden, n heads, g head groups, d channels of a head, f ffn, v vocabulary.
"""
