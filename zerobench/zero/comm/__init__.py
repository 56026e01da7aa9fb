"""All communication between ranks goes through this package: one interface, and its implementations."""
