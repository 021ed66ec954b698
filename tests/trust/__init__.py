"""Attacks on fpk: wrong kernels made by rule, arguments and files made by chance."""
