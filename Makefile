# Two commands are enough: `make bench` runs the main job, `make test` the tests.
# Every target sets up .venv first, where that is not done yet.

PYTHON ?= python3
RUN := .venv/bin/python
# Hundreds of processes would compile every module again.
export PYTHONDONTWRITEBYTECODE =
REFERENCE := results/reference/cpu

.PHONY: help setup results experiments bench check test test-all mutants lint budget plots pages notebook docs reference
.PHONY: questions compare published gpu-suite peers setup-browser setup-triton test-triton kernel-ulps lock replay report fake-equality
.PHONY: table1 answer-times certificates gpu-runs one-gpu update-traffic published-runs predicted-runs
.PHONY: predicted-maps watch-cost
.PHONY: largest-model clean

help:
	@echo "make bench      DDP and ZeRO-1/2/3 on real text: table, parquet files and figure"
	@echo "make check      for the working day: lint, types and the quick tests, in a minute"
	@echo "make test       the tests, in 9 minutes on two cores"
	@echo "make test-all   the tests in every world, those that repeat what others show as well"
	@echo "make mutants    faults planted one at a time: does a test catch each? (MUTANTS=--help)"
	@echo "make lint       ruff and mypy"
	@echo "make budget     this code against the project's own budgets"
	@echo "make plots      every figure, and the tables of README and docs/, again from the committed tables"
	@echo "make pages      the tables of README and docs/ alone"
	@echo "make notebook   the tutorial notebook, executed: its page in docs/, with the outputs and figures of that run"
	@echo "make docs       the documents as a site: build/docs/index.html, which opens from the disk"
	@echo "make results    the tables that older code recorded, again, in order of prominence; all of them take three hours"
	@echo "make experiments  the tables of some experiments again (EXPERIMENTS=\"stages losses\"), then make plots"
	@echo "make reference  the committed tables again, on this machine (results/reference/)"
	@echo "make compare    our stages and FSDP2, ZeroRedundancyOptimizer, DeepSpeed: ratios and goals (results/compare/)"
	@echo "make published  figures of the papers: formula, executed, printed, in two minutes (results/published/)"
	@echo "make largest-model  the largest model for each strategy, executed (results/largest_model/)"
	@echo "make table1     table 1 of the ZeRO paper, executed up to 1T parameters on 1,024 ranks (results/table1/)"
	@echo "make questions  commands whose output pages show, run again (QUESTIONS=\"t1 t9\")"
	@echo "make replay     the recorded step as a page (docs/assets/), with screenshots; needs make setup-browser"
	@echo "make report     the example of a report (docs/assets/report/), with screenshots; needs make setup-browser"
	@echo "make answer-times  how long the first commands take, as ratios to import torch (results/answer_times.csv)"
	@echo "make certificates  what certificates say of honest loops and planted failures (results/certificates/)"
	@echo "make gpu-suite  what this machine's GPU can do, in 8 minutes (OUT=results/runs/gpu-suite, FLAGS=--small)"
	@echo "make fake-equality  every variant in real worlds and on fake tensors: differences (results/fake_equality/)"
	@echo "make predicted-runs  others' throughput and our predictions of it; fits the scales (results/predicted_runs/)"
	@echo "make predicted-maps  the fastest strategy over model and ranks, networks of break-even (results/predicted_maps/)"
	@echo "make watch-cost  what a watched and a verified step cost, as ratios to a plain one (results/watch_cost.csv)"
	@echo "make one-gpu   rates of one GPU, fitted to results/h100; the next machines' steps, predicted"
	@echo "make gpu-runs  a GPU's peaks and steps, with estimates and predictions made without one (results/h100/)"
	@echo "make kernel-ulps  our kernel of Adam's update against torch's, interpreted (results/kernel_ulps.csv)"
	@echo "make update-traffic  memory traffic and kernels of an update on a GPU, counted (results/update_traffic.csv)"
	@echo "make peers      DeepSpeed into .venv, from source; without it make compare leaves DeepSpeed out"
	@echo "make published-runs  others' measured peaks and our estimates of them (results/published_runs/)"
	@echo "make test-triton  the kernels of a GPU's update, interpreted on the CPU; installs Triton, 700 MB, in build/"
	@echo "make setup-browser  a headless Chromium, for the tests of pages and for their screenshots"
	@echo "make setup      what all of them use: .venv with the pinned versions, each file by its hash"
	@echo "make lock       the hashes again, after a change of pyproject.toml or constraints.txt (requirements/)"

setup: .venv/installed

# Packages by their SHA-256 (requirements/). torch first from the disk, where pip is set up to find it there (find-links):
# a build for the CPU, for example. The libraries of CUDA only where torch is a build that needs them. Modules are compiled
# at the end on all cores, where pip takes one, but for those that hardly anybody imports; those in the syntax of a later
# Python cannot be, which is harmless.
INSTALL = $(RUN) -m pip install --no-compile --no-deps --no-build-isolation --require-hashes
NEEDS_CUDA = from importlib.metadata import requires; exit(not any("nvidia" in one for one in requires("torch")))

.venv/installed: pyproject.toml requirements/build.txt requirements/torch.txt requirements/ci.txt requirements/cuda.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -r requirements/build.txt
	@{ $(INSTALL) --quiet --no-index -r requirements/torch.txt 2> /dev/null || $(INSTALL) -r requirements/torch.txt; } & \
	$(INSTALL) -r requirements/ci.txt && wait $$!
	@if $(RUN) -c '$(NEEDS_CUDA)'; then $(INSTALL) -r requirements/cuda.txt; fi
	$(RUN) -m pip install --no-deps --no-build-isolation -e .
	$(RUN) -m pip check
	@$(RUN) -m compileall -q -j 0 -x '/(tests|testing|models)/' .venv/lib > .venv/uncompiled.txt || true
	@touch .venv/installed

lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install uv==0.13.9
	PATH=build/lock/bin:$$PATH build/lock/bin/python requirements/lock.py

# Tests of pages skip without a browser. Chromium and its driver are the system's, of one version: apt's, on Debian.
setup-browser: .venv/browser
	@$(RUN) -c 'import sys; from tools.docs.chromium import missing; sys.exit(bool(missing()))' 2> /dev/null || \
	  { test "$$(id -u)" = 0 && apt-get install --yes chromium chromium-driver; } || \
	  { echo "run: sudo apt-get install chromium chromium-driver"; exit 1; }

.venv/browser: requirements/browser.txt | setup
	$(INSTALL) -r requirements/browser.txt
	$(RUN) -m pip check
	@touch .venv/browser

# Triton in a folder of its own: 700 MB, and torch.compile would find it in .venv.
setup-triton: build/triton/installed

build/triton/installed: requirements/triton.txt | setup
	$(INSTALL) --quiet --target build/triton --upgrade -r requirements/triton.txt
	@touch build/triton/installed

# Triton's kernels, interpreted on the CPU.
test-triton: setup-triton
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(PYTEST) tests/unit/test_adam_kernel.py

kernel-ulps: setup-triton
	PYTHONPATH=build/triton $(VALIDATE) kernel-ulps
	$(RUN) -m tools.docs.recorded results/kernel_ulps.csv
	$(RUN) tools/docs/pages.py

bench: setup
	@code=0; $(RUN) -m zerobench experiment=stages || code=$$?; \
	test $$code -gt 1 || $(RUN) -m zerobench plot memory results/runs --out results/runs/figures || code=$$?; \
	exit $$code

# Two tests run at once on two cores, and more ranks than cores help nobody. tests/conftest.py spreads them.
# A worker that dies ends the tests: after a restart pytest-xdist waits for tests that no worker has.
WORKERS ?= 2
PYTEST = $(RUN) -m pytest --numprocesses $(WORKERS) --max-worker-restart=0

check: lint
	$(PYTEST) -m "not slow" tests/unit tests/test_layers.py

test: setup
	$(PYTEST) $(TESTS)

test-all:
	$(MAKE) test TESTS=--thorough

mutants: setup
	$(RUN) -m tests.mutations $(MUTANTS)

lint: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	.venv/bin/lint-imports --no-cache

plots: setup
	$(RUN) -m analysis all $(REFERENCE)
	$(RUN) tools/docs/pages.py

pages: setup
	$(RUN) tools/docs/pages.py

notebook: setup
	$(RUN) tools/docs/notebook.py

docs: .venv/documents
	$(RUN) tools/docs/site.py
	@$(RUN) -m tools.docs.recorded

.venv/documents: requirements/docs.txt | setup
	$(INSTALL) -r requirements/docs.txt
	$(RUN) -m pip check
	@touch .venv/documents

# The experiments that figures and tables are made of: FIGURES in analysis/__main__.py, and those with a table only. Some of
# them: EXPERIMENTS="stages". Those whose times nobody reads run two at a time.
EXPERIMENTS ?= $(shell $(RUN) -m analysis all --experiments)
UNTIMED = $(filter $(shell $(RUN) -m analysis all --experiments untimed),$(EXPERIMENTS))

reference: experiments
	$(RUN) -m zerobench noise record device=cpu world_size=2 results_dir=results/runs/reference/noise
	$(RUN) -m zerobench budget record --file results/budgets/gpt_tiny.yaml experiment=budget
	for name in buckets tiers offload delayed groups nodes residual low_bit muon experts; do \
	  $(RUN) -m zerobench budget record --file results/budgets/$$name.yaml experiment=budget_$$name || exit $$?; \
	done
	$(MAKE) plots

experiments: setup
	for name in $(filter-out $(UNTIMED),$(EXPERIMENTS)); do $(MAKE) record-$$name || exit $$?; done
	$(if $(UNTIMED),$(MAKE) --jobs 2 $(addprefix record-,$(UNTIMED)))

# A second sweep of the same experiment, with these words on top.
ALSO_settings := strategy=fsdp2 strategy.reshard_ranks=2
ALSO_lora := strategy=fsdp2 strategy.upcast_frozen=false

record-%: setup
	$(RUN) -m zerobench experiment=$* device=cpu results_dir=results/runs/reference/$*
	$(if $(ALSO_$*),$(RUN) -m zerobench experiment=$* device=cpu results_dir=results/runs/reference/$* $(ALSO_$*))
	$(RUN) -m tools.docs.recorded results/runs/reference/$* $(REFERENCE)/$*

# All tables that other code than today's recorded, in order of prominence, then pages and figures. A call that was stopped
# goes on: a table is signed at its end, and finished cells of the same code are taken as they are.
results: setup
	targets=$$($(RUN) -m tools.docs.recorded targets) || exit $$?; \
	echo "$$targets" | while read -r target; do test -z "$$target" || $(MAKE) $$target < /dev/null || exit $$?; done
	$(MAKE) report notebook plots

# Other sizes: make compare COMPARE=compare COMPARE_TO=/tmp/tried OVERRIDES="model=gpt_tiny measure=quick"
COMPARE ?= compare compare_50m compare_n4
COMPARE_DEVICE ?= cpu
COMPARE_TO ?= results/compare/$(COMPARE_DEVICE)
COMPARE_RUNS ?= results/runs/compare

compare: setup
	for name in $(COMPARE); do \
	  runs=$(COMPARE_RUNS)/$$name; \
	  $(RUN) -m zerobench experiment=$$name device=$(COMPARE_DEVICE) results_dir=$$runs $(OVERRIDES); \
	  test $$? -le 1 || exit 1; \
	  $(RUN) -m zerobench export $$runs --latest --format parquet --out $(COMPARE_TO)/$$name || exit 1; \
	done
	$(RUN) -m analysis compare $(COMPARE_TO)
	test $(COMPARE_TO) != results/compare/cpu || $(RUN) -m tools.docs.recorded $(COMPARE_TO)
	$(RUN) tools/docs/pages.py

# The proofs that are no part of the product: each explains itself, $(VALIDATE) NAME --help.
VALIDATE = $(RUN) -m validation

published: setup
	$(VALIDATE) published $(PUBLISHED)
	$(if $(PUBLISHED),,$(RUN) -m tools.docs.recorded results/published/published.csv)
	$(RUN) tools/docs/pages.py

# A plan that is there is not made again: remove results/largest_model/*.json first.
LARGEST_TO ?= results/largest_model
LARGEST = $(RUN) -m zerobench plan --goal largest_model --family zero --format json model=gpt model.vocabulary=50257 \
  sequence=1024 activation=checkpoint

largest-model: setup
	mkdir -p $(LARGEST_TO)
	plan() { to=$(LARGEST_TO)/$$1.json; shift; test -s $$to || { $(LARGEST) "$$@" > $$to.part && mv $$to.part $$to; }; }; \
	for size in 40GiB 80GiB; do \
	  for name in ddp zero1 zero2 megatron fsdp2_no_reshard zero3 fsdp2; do \
	    plan 8x$$size-$$name --device-memory $$size --gpus 8 strategy=$$name offload=none || exit 1; \
	  done; \
	  for name in zero1 zero2 zero3; do \
	    plan 8x$$size-$$name-cpu --device-memory $$size --gpus 8 --host-memory 192GiB strategy=$$name offload=cpu || exit 1; \
	  done; \
	  plan 8x$$size-zero3-nvme --device-memory $$size --gpus 8 --host-memory 192GiB --disk 3500GB strategy=zero3 offload.block_bytes=256MiB \
	    offload=nvme || exit 1; \
	done; \
	for name in ddp zero1 zero2 zero3; do \
	  plan 64x32GB-$$name --device-memory 32GB --gpus 64 strategy=$$name offload=none || exit 1; \
	done
	test $(LARGEST_TO) != results/largest_model || $(RUN) -m tools.docs.recorded $(LARGEST_TO)
	$(RUN) tools/docs/pages.py

# Cells that results/table1 has already are not executed again: TABLE1=--rerun, or TABLE1="--only 7.5B N=64 --rerun".
table1: setup
	$(VALIDATE) table1 $(TABLE1)
	$(if $(filter --rerun,$(TABLE1)),$(RUN) -m tools.docs.recorded results/table1)
	$(RUN) -m analysis table1
	$(RUN) tools/docs/pages.py

RECORDED := results/replay
SHOWN := docs/assets/replay

replay: setup
	rm -rf results/runs/replay
	$(RUN) -m zerobench -m strategy=ddp,zero1,zero2,zero3 model=gpt_tiny world_size=2 device=cpu measure.events=true \
	  measure.passes=accounted measure.steps=2 results_dir=results/runs/replay
	$(RUN) -m zerobench export results/runs/replay --latest --format parquet --out $(RECORDED)
	$(RUN) -m tools.docs.recorded $(RECORDED)
	$(RUN) -m zerobench replay $(RECORDED) --out $(SHOWN)/step.html
	$(RUN) tools/docs/screenshots.py

# Commands whose output pages show. A file has its command in the first line; one that fails leaves its file as it is.
QUESTIONS ?= $(basename $(notdir $(wildcard results/published/questions/*.txt)))

questions: setup
	for name in $(QUESTIONS); do \
	  file=results/published/questions/$$name.txt; line=$$(head -n 1 $$file); \
	  said=$$(export PATH=$(CURDIR)/.venv/bin:$$PATH COLUMNS=120; eval "$${line#??}") || exit $$?; \
	  printf '%s\n\n%s\n' "$$line" "$$(printf '%s' "$$said" | sed 's/ *$$//')" > $$file; \
	done
	$(if $(filter file,$(origin QUESTIONS)),$(RUN) -m tools.docs.recorded results/published/questions)
	$(RUN) tools/docs/pages.py

# The report that docs/how-to/report.md shows, of the committed comparison with the peers.
report: setup
	$(RUN) -m zerobench report results/compare/cpu/compare --where strategy=ddp,zero1,zero2,zero3,fsdp2 \
	  --title "ZeRO beside DDP and FSDP2" --out docs/assets/report/peers.html
	$(RUN) tools/docs/screenshots.py report report_dark report_phone

OUT ?= results/runs/gpu-suite

gpu-suite: setup
	$(VALIDATE) gpu-suite --out $(OUT) $(FLAGS)

gpu-runs: setup
	$(VALIDATE) gpu-runs results/h100
	$(RUN) -m tools.docs.recorded results/h100
	$(RUN) tools/docs/pages.py

update-traffic: setup
	$(VALIDATE) update-traffic
	$(RUN) -m tools.docs.recorded results/update_traffic.csv
	$(RUN) tools/docs/pages.py

one-gpu: setup
	$(VALIDATE) one-gpu results/h100
	$(RUN) tools/docs/pages.py

published-runs: setup
	$(VALIDATE) published-runs $(PUBLISHED_RUNS)
	$(if $(PUBLISHED_RUNS),,$(RUN) -m tools.docs.recorded results/published_runs)
	$(RUN) tools/docs/pages.py

predicted-maps: setup
	$(VALIDATE) predicted-maps
	$(RUN) -m tools.docs.recorded results/predicted_maps
	$(RUN) -m analysis predicted_maps
	$(RUN) tools/docs/pages.py

# FILE=mine.csv predicts the runs of a file of the same columns, and fits nothing.
predicted-runs: setup
	$(VALIDATE) predicted-runs $(if $(FILE),--file $(FILE))
	$(if $(FILE),,$(RUN) -m tools.docs.recorded results/predicted_runs)

peers: setup
	$(RUN) -m pip install setuptools wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(RUN) -m pip install -c constraints.txt --no-build-isolation deepspeed

# EQUALITY= goes on where a call was stopped.
EQUALITY ?= --rerun

fake-equality: setup
	$(VALIDATE) fake-equality $(EQUALITY)
	$(RUN) -m tools.docs.recorded results/fake_equality

# On an idle machine: ANSWER_TIMES="--before REV --rounds 3"
answer-times: setup
	$(VALIDATE) answer-times $(ANSWER_TIMES)
	$(RUN) -m tools.docs.recorded results/answer_times.csv

# CERTIFICATES="--seed 7", or CERTIFICATES="--only '*lora*'" for some of them, on standard output.
certificates: setup
	$(VALIDATE) certificates $(CERTIFICATES)
	$(if $(CERTIFICATES),,$(RUN) -m tools.docs.recorded results/certificates)

# On an idle machine, 4 minutes: WATCH_COST="--rounds 2"
watch-cost: setup
	$(VALIDATE) watch-cost $(WATCH_COST)
	$(RUN) -m tools.docs.recorded results/watch_cost.csv
	$(RUN) tools/docs/pages.py

# BUDGETS="results/budgets/tiers.yaml" for some of them
budget: setup
	$(RUN) -m zerobench budget check $(BUDGETS) results_dir=results/runs/budget

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
