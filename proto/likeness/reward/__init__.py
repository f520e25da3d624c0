"""The contract of the reward service, by version."""
