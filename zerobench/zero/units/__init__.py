"""Parameters that are communicated together: the buckets of stages 1 and 2, the module groups of stage 3."""
