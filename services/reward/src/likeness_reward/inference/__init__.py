"""Running networks: one Protocol, one module per runtime."""
