"""A memory gate in anyone's tests: the pytest plugin that `import zerobench` brings.

    @pytest.mark.zerobench(peak="<= 24 psi", leaks=0)
    def test_step(zerobench_watch):
        with zerobench_watch(model, optimizer):
            train()

plugin.py has pytest's hooks and loads nothing, request.py reads a marker, limits.py has limits by hand and records.py
recorded ones, watches.py is the fixture, verdict.py judges, ranks.py and rank_process.py run a test in ranks.
"""
