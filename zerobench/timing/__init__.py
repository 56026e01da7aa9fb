"""Time of a step before there is a run: the executed schedule of a cell, on a device and cluster that are described.

hardware.py    devices and clusters, a yaml file each, with the source of each figure
costs.py       seconds of an operator, and of a collective: from tables of measured times, else by a roofline
timeline.py    the schedule laid out in time: streams, lanes of the network, the host
prediction.py  a cell's step, with an interval
"""
