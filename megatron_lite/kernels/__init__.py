"""Operations with hand-written gradients, one file each: formula, torch reference, Triton kernel,
public function."""
