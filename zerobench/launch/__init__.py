"""Rank processes: forked for each pass and supervised until they end, on this machine or over a job."""
