"""`python -m flatout`, which is also how torchrun starts it."""

from flatout.cli import main

main()
