"""`zerobench history`: figures over commits, and the commits at which they moved.

An *entry* is a measured commit: a collection of its runs, or a results folder. A *series* is one metric of one cell
over the entries. A *step* is an entry whose value differs from that of the entry before that has one. A *gap* counts
the commits between two entries that were not measured.

    entries.py   a folder, or a git branch, becomes entries in git's order
    store.py     `zerobench history add`: a commit's runs become an entry
    series.py    series and their steps
    tables.py    text, Markdown, CSV, JSON
    figures.py   a figure per metric
    page.py      a page of tables and figures
"""
