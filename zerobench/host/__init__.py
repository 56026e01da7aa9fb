"""This process and its machine: device and seeds of a rank, signals, standard streams, temporary folders."""
