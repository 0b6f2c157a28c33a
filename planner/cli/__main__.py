"""`python -m planner.cli`: the command line without the installed console script."""

from planner.cli import main

main()
