"""What certificates of `zerobench.watch(..., verify=)` say of honest training loops, and of planted failures.

loops.py     a loop, its data and its watch; the steps that most loops share
honest.py    HONEST: name -> a loop without a failure
planted.py   PLANTED: name -> a loop with one failure, and the rows that name it
command.py   `python -m validation certificates`, the classes of certificates, and the rows of the tables
"""
