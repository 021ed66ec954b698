"""`python -m fpk`."""

from fpk.cli import app

if __name__ == "__main__":
    app(prog_name="fpk")
