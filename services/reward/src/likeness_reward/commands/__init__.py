"""The commands of likeness-reward, a file for each kind."""
