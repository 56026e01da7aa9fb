"""Writes what the documents generate: tables and figures in numbers, reference pages, excerpts of the code.

pages.py    blocks of README and docs/ that are committed, from the committed tables: `make pages`
blocks.md   templates of these blocks; blocks.py, the table of all blocks, says where their rows come from
hook.py     what mkdocs fills in as it builds the site: references, excerpts, linked files: `make docs`
"""
