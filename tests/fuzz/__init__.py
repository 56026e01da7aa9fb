"""A fuzz of all that zerobench reads from others: command lines with their config folders, and files.

case        one input and what is held against it; its name, "config:17" or "file:17", and the seed draw it, so that a
            case can be run again alone, whatever ran before it
config      a command line, valid or damaged, composed to cells as `zerobench` does it (commands.py, held by oracle.py)
file        a valid file of some reader, damaged, and read (files.py, damage.py)
finding     a case that ended otherwise than it may: a sentence
watch       all that a case may not touch, and its state before and after (watch.py)
slice       so many cases that one process runs; a slice that was run is not run again (run.py)

A library as hypothesis would shrink a finding, but its cases follow from all that it has run before: here each has a
number, so that ten thousand are spread over processes, taken up again after an interruption, and named in one line.
"""
