"""Fake execution held against real ranks: cells, their two executions, and what differs between them."""
