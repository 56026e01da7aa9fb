"""The command line: runs, sweeps, reuse, mistakes, exit codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zerobench
from tests.end_to_end.command import ROOT, SMALL
from tests.end_to_end.command import zerobench as run
from zerobench import cli
from zerobench.config.compose import compose_cells
from zerobench.config.keys import OTHER_WORDS, is_key
from zerobench.records import CATEGORIES


def test_a_sweep_becomes_rows_files_and_a_table_and_is_reused(tmp_path: Path) -> None:
    done = run("-m", "strategy=ddp,zero3", "world_size=2", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = zerobench.load(tmp_path / "results/runs")
    assert [*zip(results.runs.strategy, results.runs.status, strict=True)] == [("ddp", "ok"), ("zero3", "ok")]
    assert results.runs.loss_last.nunique() == 1
    assert results.runs.passes_agree.all()
    assert results.runs.peak_bytes.dtype == "Int64"
    assert {f"peak_{category}_bytes" for category in CATEGORIES} <= {*results.runs}
    for table in (results.steps, results.memory, results.tensors, results.traffic):
        assert set(table.run_id) == set(results.runs.run_id)
    folder = tmp_path / "results/runs" / results.runs.run_id[0]
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "provenance.json", "run.json", "memory.parquet", "logs"} <= names
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["schema_version"], config["batch"], config["micro_batch"], config["world_size"]) == (2, 8, 4, 2)
    assert "zero3 gpt_tiny N=2 b=8" in done.stdout
    assert not list((tmp_path / "results/runs").glob(".partial-*"))

    again = run("-m", "strategy=zero3,ddp", "batch=8", "world_size=2", *SMALL, cwd=tmp_path)
    assert (again.returncode, again.stderr.count("reused an earlier run")) == (0, 2)
    assert len(zerobench.load(tmp_path / "results/runs").runs) == 2

    assert len(run("export", "results/runs", "--format", "csv", cwd=tmp_path).stdout.splitlines()) == 3
    markdown = run("export", "--format", "markdown", "--latest", "--out", "table.md", cwd=tmp_path)
    assert markdown.returncode == 0
    assert (tmp_path / "table.md").read_text().count("\n") == 4


FASTEST = ["plan", "--device-memory", "2GiB", "--gpus", "8", "--goal", "fastest", "model=mlp", "--cluster", "h100-3200"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strategy.stge=1"], "strategy.stge: no such key"),
        (["strategy=zero2", "+strategy.bucket_byte=1024"], "did you mean strategy.bucket_bytes?"),
        (["strategy=ddp", "strategy.prefetch=2"], "strategy.prefetch: no such key under strategy=ddp"),
        (["-m", "strategy=ddp,zero3", "strategy.prefetch=two"], "strategy.prefetch=two: wants an integer"),
        (["offload.path=there"], "offload.path: no such key; choose offload=nvme for it"),
        (["optimizer.momentum=1"], "optimizer.momentum: no such key; choose optimizer=muon|rmsprop|sgd for it"),
        (["activation.x=1"], "activation.x: no such key; this choice has no keys of its own"),
        (["dtype=bf16"], "dtype: no such key; did you mean precision, as in precision=bf16?"),
        (["batch_size=4"], "did you mean micro_batch (samples per rank in one forward) or batch"),
        (["model.architecture=gpt2"], "did you mean huggingface.architecture, with model=huggingface?"),
        (["run", "strategy=zero2"], "a run is zerobench KEY=VALUE"),
        (["-m", "objective=peak_bytes", "seed=1,2"], "objective=peak_bytes: no sweeper asks for it"),
        (["-m", "hydra.sweeper.params={strategy:'ddp,zero1'}"], "it cannot be composed"),
        (["offload=cpu", "offload.delayed_after=5"], "offload.delayed_after: it has no effect without offload.delayed"),
        (["measure.steps=1.5"], "measure.steps=1.5: wants an integer, and 1.5 is none"),
        (["strategy=zero22"], "strategy=zero22: no such strategy; did you mean zero2?"),
        (["strategy=ddp,zero1"], "strategy: several values make a sweep; add -m"),
        (["exprot"], "exprot: neither KEY=VALUE nor a verb; did you mean export?"),
        (["model=mlp", "model.heads=2"], "no such key under model=mlp, which has layers, hidden, vocabulary; choose"),
        (["~strategy"], "keys cannot be deleted"),
        (["world_size", "=", "2"], "=: neither KEY=VALUE nor a verb; write world_size=2, without spaces"),
        (["--strategy", "zero2"], "--strategy: no such flag; a key has no dashes: strategy=VALUE"),
        (["model=quite_another"], "if a script registers it, run that script: python SCRIPT model=quite_another"),
        (["model._target_=os.system"], "model._target_: no such key"),
        (["strategy=zero1", "strategy.name=zero2"], "strategy.name=zero2: it follows from the group"),
        (["huggingface.layers=3"], "it has a meaning for models that transformers builds; add model="),
        (["results_dir=/dev/null"], "/dev/null is no folder that can be written to"),
        (["-m", "seed=interval(0,1)"], "an interval has no end of values"),
        (["--help", "strategy=zero4"], "strategy=zero4: no such strategy; there are zero1, zero2, zero3"),
        (["--help", "bath"], "bath: neither a group, a key nor a verb; did you mean batch?"),
        (["--help", "lr"], "did you mean optimizer.lr?"),
        (["compare", "."], "compare: name two sides, A and B: runs or folders; or --interleave REV_A REV_B"),
        (["compare", "a", "b", "--", "strategy=ddp"], "compare: --: cells to measure are for --interleave"),
        (["compare", "--interleave", "HEAD", "."], "compare: --interleave: give the cells after --"),
        (["compare", "--interleave", "HEAD", ".", "--", "measure.repeats=3"], "measure.repeats: --interleave sets it"),
        (["compare", "--interleave", "nowhere", ".", "--", "seed=1"], "--interleave: nowhere: git says: "),
        (["compare", "nowhere", "."], "compare: nowhere: there is no run, and no folder of runs, of that name"),
        (["noise", "record", "--runs", "nowhere"], "noise: nowhere: there is no run"),
        (["noise", "record", "-m", "strategy=ddp,zero1"], "makes 2 cells; noise is measured on one"),
        (["noise", "record", "measure.warmup=1"], "measure.warmup=1: must be at least 2"),
        (["calibrate", "--sizes", "64KiB"], "--sizes 64KiB: give two sizes"),
        (["estimate", "model=mlp", "--device-memory", "0"], "--device-memory 0: must be above 0"),
        (["plan", "--device-memory", "1GiB", "--gpus", "2", "offload="], "offload=: name at least one offload"),
        ([*FASTEST[:6], "fewest_gpus", "node_size=2"], "node_size: must divide the number of GPUs"),
        (["export", "--table", "memory", "--price", "2"], "--price 2: is for --table runs"),
        (["budget", "record"], "name the cells, as in"),
        (["budget", "record", "--metrics", "peak", "strategy=zero2"], "--metrics: peak is none of peak_bytes"),
        (["budget", "check", "--where", "strategy=ddp"], "--where selects finished runs"),
        (["compare", "a", "b", "--runs", "c"], "--runs is the folder of the runs of --interleave"),
        (["export", "--format", "parquet", "--out", "x", "--price", "2"], "--price are for csv, markdown and latex"),
        (["budget"], "record or check?"),
        (["predict", "--cluster", "h100"], "cluster h100 is not described"),
        (["predict"], "--cluster: name one of"),
        (FASTEST[:-2], "--cluster: is what --goal fastest needs"),
        ([*FASTEST, "batch=44"], "batch=44: samples of a step over all GPUs, a multiple of --gpus 8"),
        ([*FASTEST, "batch=48", "accumulation=2"], "accumulation: follows from batch="),
        (["-m", "seed=range(0,1e9)"], "seed=range(0,1e9): a range of 1,000,000,000 values; a sweep has at most 10,000"),
        (["-m", "seed=range(0,9000)", "sequence=range(1,9000)"], "seed, sequence: 80,991,000 cells; at most 10,000"),
        (["results_dir=" + "a" * 300], "it is no folder's name: File name too long"),
        (["\x1b[2Jmodel=mlp"], r"\x1b[2Jmodel"),
        (["--config-name", "nothing"], "--config-name: zerobench has one primary config"),
        (["--experimental-rerun=config.pickle"], "it unpickles a file, which can run code"),
        (["export", "a\x1b[2J"], r"a\x1b[2J: there is no such results folder"),
    ],
)
def test_a_mistyped_command_is_one_sentence_and_exit_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    errors = capsys.readouterr().err
    assert [words in line for line in errors.splitlines()] == [True]
    assert len(errors) < 2500
    assert not {"\x1b", "\x07"} & {*errors}
    assert "did you mean" not in errors or "(valid:" not in errors, "a good suggestion is enough"
    assert not list(tmp_path.iterdir())


def test_other_tools_words_are_answered_with_keys_that_are_there() -> None:
    """The answer's first word is a key, or a group, that some choice has."""
    for key, answer in OTHER_WORDS.items():
        for part in answer.split(" or ")[0].split(" and "):
            ours = part.split(",")[0].split(" (")[0].split("=")[0]
            assert is_key(ours), (key, ours)


@pytest.mark.shown(10)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["batch=8", "micro_batch=2"], "give either batch or micro_batch=2, not both"),
        (["measure.warmup=1"], "measure.warmup=1: must be at least 2"),
        (["optimizer.beta1=1"], "optimizer.beta1=1: must be below 1"),
        (["clip_norm=inf"], "clip_norm=inf: it has no effect without clip"),
        (["model.heads=5"], "model.heads=5: it must divide hidden=16"),
        (["model.vocabulary=100"], "model.vocabulary=100: the data's tokens need at least 256"),
        (["model.positions=8"], "sequence=16: the model has only 8 positions; add model.positions=16, or"),
        (["data.path=nowhere.txt"], "data.path=nowhere.txt: there is no such file"),
        (["-m", "seed=1,2", "world_size=0"], "world_size=0: must be at least 1"),
        (["world_size=512"], "use backend=simulated for the bytes and volumes of one rank"),
        (["strategy=zero1", "strategy.bucket_bytes=3"], "strategy.bucket_bytes=3: must be at least 1024"),
        pytest.param(
            ["device=cuda"],
            "device=cuda: this machine has no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_command_whose_every_cell_is_refused_is_one_message_and_exit_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == shown.err.count(words) == 1
    assert (shown.err[:11], shown.out) == ("zerobench: ", "")
    assert not list(tmp_path.iterdir()), "a refused cell is not a run"


def test_a_cell_that_cannot_be_resolved_does_not_end_the_sweep(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["-m", "sequence='${micro_batch}',16", "world_size=1", *SMALL[:-2], "device=cpu"]) == 1
    shown = capsys.readouterr()
    assert "invalid" in shown.out
    assert "Traceback" not in shown.err
    assert list(zerobench.load(tmp_path / "results/runs").runs.status) == ["ok"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("plot memry --out x.png", "; did you mean memory?"),
        ("export --format marddown", "; did you mean markdown?"),
        *(
            (f"{verb} --jobs 0", "argument --jobs: '0' must be a number of cells, at least 1")
            for verb in ("plan --gpus 2", "estimate", "predict --cluster h100-3200", "replay")
        ),
        *(
            (f"{verb} --timeout {seconds}", f"{seconds}' must be seconds, from ")
            for verb, seconds in (("estimate", "inf"), ("predict", "1e30"), ("calibrate", "nan"))
        ),
    ],
)
def test_a_wrong_option_of_a_verb_is_named(words: str, error: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.run(words.split())
    assert error in capsys.readouterr().err


def test_a_glob_says_which_choices_it_takes(capsys) -> None:
    """`zero*` is the name of a peer, too; `zero?` is our stages."""
    assert cli.run(["-m", "strategy=glob(zero*)", "world_size=2", "model=mlp", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "strategy=glob(zero*) takes zero1, zero2, zero3, zero_redundancy, zero_redundancy_tuned\n" in shown.err
    assert "5 cells" in shown.out


def test_help_teaches_and_cfg_shows(tmp_path: Path) -> None:
    shown = run("--help", cwd=tmp_path).stdout
    for words in ("zerobench -m strategy=ddp,zero1,zero2,zero3", "gpt2_124m", "zerobench export", "Exit code"):
        assert words in shown
    assert "schema" not in shown
    job = yaml.safe_load(run("strategy=zero3", "+experiment=stages", "--cfg", "job", cwd=tmp_path).stdout)
    assert (job["strategy"]["name"], job["optimizer"]["lr"]) == ("zero3", 3e-4)
    job = yaml.safe_load(run("strategy=zero3", "world_size=2", "--cfg", "job", cwd=tmp_path).stdout)
    assert (job["world_size"], job["batch"], job["micro_batch"]) == (2, 8, 4), "what will run, not null"
    assert (job["precision"]["gradient_dtype"], job["backend"], job["clip"]) == ("fp32", "gloo", None)
    assert run("export", "nowhere", cwd=tmp_path).returncode == 2


COMPOSES_WITH = {"offload": "strategy=zero2", "buffers": "strategy=zero2", "zeropp": "strategy=zero3 node_size=1"}
"""Groups whose choices make no sense with the default strategy, ddp -> what they are for."""


CHOICES = sorted((ROOT / "conf").glob("*/*.yaml"))
ALONE = ("experiment", *COMPOSES_WITH)
"""Groups whose choices are composed one by one; the page of keys, which a test makes again, composes all others."""

WITH_PARTS = ("partition", "partition_offload")
"""Choices for ranks that share a model."""


@pytest.mark.shown(8)
@pytest.mark.parametrize(
    "path", [p for p in CHOICES if p.parent.name in ALONE], ids=lambda p: f"{p.parent.name}={p.stem}"
)
def test_every_yaml_composes_and_resolves(path: Path) -> None:
    words = COMPOSES_WITH.get(path.parent.name, "").split()
    swept = (yaml.safe_load(path.read_text()) or {}).get("hydra", {}).get("sweeper", {}).get("params", {})
    assert_composes(
        f"{path.parent.name}={path.stem}", *words, *(f"{key}={first(values)}" for key, values in swept.items())
    )


def first(values: object) -> str:
    """The first value of a sweep over a key."""
    return str(values).split(",")[0]


def assert_composes(*words: str) -> None:
    for cell in compose_cells(["-m", *words, "device=cpu"]):
        assert [one for one in cell.problems if "is not installed" not in one] == [], words  # an extra may be missing
        assert len(cell.cell_id) == 12


def test_a_key_that_the_default_choice_lacks_goes_with_a_sweep_over_its_group() -> None:
    """Hydra alone would look for it under the default strategy, ddp, and refuse."""
    cells = compose_cells(["-m", "strategy=zero1,zero2", "strategy.reduce_with=all_reduce", "optimizer=nadam,adam"])
    assert [cell.config.strategy.reduce_with for cell in cells] == ["all_reduce"] * 4
    halves = compose_cells(["-m", "precision=bf16,fp16", "strategy=zero1", "precision.gradient_dtype='fp32'"])
    assert [cell.config.precision.gradient_dtype for cell in halves] == ["fp32"] * 2
    (cell,) = compose_cells([f"results_dir=~/{'9' * 20}"])
    assert cell.config.results_dir == str(Path.home() / ("9" * 20)), "a folder is no number"


LOOSE: list[tuple[list[str], str, list[Any]]] = [
    (["strategy=ddp,zero3", "strategy.prefetch=2", "results_dir=a,b"], "strategy", [None, None, 2, 2]),
    (["offload=nvme,none", "offload.block_bytes=8192"], "offload", [8192, None]),
    (["activation=none,offload", "++activation.least_bytes=4096"], "activation", [None, 4096]),
    (["experiment=activation", "strategy=zero2", "activation.least_bytes=512"], "activation", [None, None, 512, 512]),
]


@pytest.mark.shown(2)
@pytest.mark.parametrize(("arguments", "group", "wanted"), LOOSE)
def test_a_key_that_some_choices_of_a_sweep_lack_is_left_out_there(
    arguments: list[str], group: str, wanted: list[Any]
) -> None:
    beside = [] if any(one.startswith("strategy") for one in arguments) else ["strategy=zero2"]
    cells = compose_cells(["-m", *arguments, *beside, "device=cpu"])
    key = next(one for one in arguments if "." in one.split("=")[0]).split("=")[0].split(".")[1]
    assert [cell.config.section(group).get(key) for cell in cells] == wanted
    assert [cell.problems for cell in cells] == [()] * len(cells)


@pytest.mark.thorough
def test_transformers_models_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = ["huggingface.layers=1", "huggingface.hidden=16", "huggingface.heads=2", "sequence=16", "device=cpu"]
    chosen = ["model=huggingface", "huggingface.architecture=gpt2", "huggingface.options.resid_pdrop=0.0"]
    done = run(*chosen, "strategy=zero3", "measure=quick", "measure.passes=accounted", *shape, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = run("model=huggingface", "huggingface.architecture=gtp2", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "huggingface.architecture=gtp2: no causal language model of that name; did you mean gpt2?" in wrong.stderr
