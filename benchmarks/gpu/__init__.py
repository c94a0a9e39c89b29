"""What to run on a GPU that is lent for minutes; README.md in this folder has the commands."""
