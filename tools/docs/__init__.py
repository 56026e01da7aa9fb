"""Writes what the documents generate: tables and figures in numbers, reference pages, excerpts of the code.

pages.py    blocks of README and docs/ that are committed, from the committed tables: `make pages`
hook.py     what mkdocs fills in as it builds the site: references, excerpts, linked files: `make docs`
"""
