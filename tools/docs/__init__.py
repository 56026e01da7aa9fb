"""Writes what the documents generate: tables and figures in numbers, reference pages, excerpts of the code.

pages.py    blocks of README and docs/ that are committed, from the committed tables: `make pages`
blocks.md   templates of these blocks; the table of all blocks in pages.py says where their rows come from
site.py     the site, with the files outside of docs/ that pages link to: `make docs`
"""
