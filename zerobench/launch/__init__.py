"""Rank processes: forked fresh for each pass, supervised to their end, on this machine or over a job."""
