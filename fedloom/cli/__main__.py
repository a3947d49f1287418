"""`python -m fedloom.cli` is the same as `fedloom`."""

from fedloom.cli import main

main()
