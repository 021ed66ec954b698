"""fpk: Triton kernels with PyTorch references for low-precision inference."""
