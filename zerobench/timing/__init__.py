"""Predicted time of a step before there is a run: a cell's simulated schedule on a described device and cluster.

hardware.py    devices and clusters, in yaml files, with the source of each figure
costs.py       seconds of an operator, and of a collective: from tables of measured times, or else by a roofline
timeline.py    the schedule laid out in time: streams, network lanes, the host
prediction.py  a cell's step, with an interval
"""
