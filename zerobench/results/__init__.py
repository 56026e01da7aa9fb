"""Finished runs: folders and tables on disk, summaries, selection, provenance, the printed table."""
