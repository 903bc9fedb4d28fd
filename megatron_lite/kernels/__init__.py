"""Operations with hand-written gradients, one file each: formula, forward, backward, one public function.

Weight gradients go straight into `weight.main_grad` (see `parameter.py`); only input gradients pass through autograd.
"""
