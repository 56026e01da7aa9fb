"""Long sweeps under fire: `make fire` shoots at a running sweep until it is done all the same.

sweep       command lines whose cells land in one results folder; a user's loop starts each again until it is done
calm        an undisturbed sweep, the reference
disturbed   a sweep under fire
shot        a signal to a victim: a process of the disturbed sweep, at an instant drawn by a seed
start       one start of a command line; a shot may end it
bad run     a run of the disturbed folder whose status is not the calm one's of its cell: a shot must account for it

commands.py   the command lines, and how they are launched      campaign.py   the sweeps, start by start
shots.py      victims, and the marksman                         judge.py      the verdict and its record
"""
