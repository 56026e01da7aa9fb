"""Finished runs: folders and tables on disk, summaries, selection, provenance, the printed table.

Everything above config may import it.
"""
