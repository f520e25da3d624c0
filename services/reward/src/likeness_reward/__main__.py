"""`python -m likeness_reward` is the same as `likeness-reward`."""

from likeness_reward.cli import main

if __name__ == "__main__":
    main()
