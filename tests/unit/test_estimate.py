"""`zerobench estimate`: its figures against a real run's, models from files and scripts, and what it refuses."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from zerobench.commands.estimate import as_csv, as_table, draw, estimate, verdict
from zerobench.commands.simulated import DEFAULTS, LargeTensor, SimulatedCell, ask
from zerobench.config.cell import CellConfig
from zerobench.config.compose import RefusedError
from zerobench.config.schema_memory import FusedBuffers
from zerobench.config.schema_training import Bf16, Sgd
from zerobench.models.huggingface import read_config
from zerobench.ranks.start_ranks import launch
from zerobench.simulation.execute import PARTS
from zerobench.worker import RankJob, run_rank
from zerobench.zero.optim.step_by_tiles import TILE_BYTES

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 977,
    "max_position_embeddings": 64, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def written(folder: Path, **more: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA, **more}.items() if value is not None}))
    return path


@pytest.mark.thorough
def test_estimates_of_a_config_json_are_what_a_real_run_holds_and_sends(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out, path = tmp_path / "found.json", written(tmp_path)
    keys = ["strategy=zero2", "world_size=2", "sequence=48", "model=huggingface", "huggingface.loss=kept"]
    assert (
        estimate([*keys, f"huggingface.config={path}", "--device", "cpu", "--format", "json", "--out", str(out)]) == 0
    )
    (one,) = json.loads(out.read_text())["estimates"]
    config = replace(CellConfig.from_dict(one["config"]), backend="gloo", tensors="real")
    jobs = [RankJob(config, "accounted", rank, f"{tmp_path}/meeting", str(tmp_path)) for rank in range(2)]
    real = launch(run_rank, jobs, tmp_path / "logs", 100)[one["rank"]]
    held = {row.category: row.max_bytes for row in real.memory if (row.phase, row.tier) == ("step", "device")}
    assert (one["peak_bytes"], one["states_bytes"]) == (held["total"], held["states"])
    assert one["wire_bytes"] == sum(row.wire_bytes for row in real.traffic if not row.control)
    assert sum(one["parts_bytes"].values()) == one["peak_bytes"]
    output = 4 * 4 * 48 * 977  # in fp32; kept, and beside it log-probabilities and two gradients as large
    assert one["parts_bytes"]["logits"] == output
    assert 0 <= one["parts_bytes"]["loss"] - 3 * output < 64  # and scalars
    assert one["in_flight_bytes"] == one["states_bytes"] - one["formula_bytes"] > 0
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 80 + 2 * 32  # q and o, k and v of two heads, the MLP, norms
    assert one["psi"] == 2 * block + 32 + 2 * 977 * 32


REFUSED = {
    "auto_map": ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map names code of its own, which is not run"),
    "trust": ({"trust_remote_code": True}, "trust_remote_code asks for external code, which is not run"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config describes quantized weights"),
    "near": ({"model_type": "lama"}, "knows no model_type lama; did you mean llama?"),
    "far": ({"model_type": "zzzzzz"}, "a newer one may, or register the model in your own script"),
    "vision": ({"model_type": "vit"}, "model_type vit is no causal language model"),
    "none": ({"model_type": None}, "it has no model_type"),
    "wrong": ({"hidden_size": "wide"}, "no config of llama: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_json_that_is_no_model_is_one_sentence(tmp_path: Path, case: str) -> None:
    pytest.importorskip("transformers")
    more, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=r"huggingface\.config=") as refused:
        read_config(str(written(tmp_path, **more)), {})
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_config_are_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for text, words in (("{", "no JSON"), ("[1]", "no mapping"), ("[" * 10**5, "no JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(str(tmp_path), {})  # a folder's config.json
    with pytest.raises(ValueError, match="there is no such file; nothing is downloaded"):
        read_config("meta-llama/Llama-3", {})
    shape = read_config(str(written(tmp_path)), {"num_hidden_layers": 3})
    assert (shape.layers, shape.vocabulary, shape.options["num_key_value_heads"]) == (3, 977, 2)
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_config(str(tmp_path), {"trust_remote_code": True})


@pytest.mark.slow
def test_what_is_left_out_serves_who_asks_first() -> None:
    question = ask(["model=gpt_tiny"])
    assert [one.config.strategy.name for one in question.cells] == DEFAULTS["strategy"].split(",")
    assert {one.config.world_size for one in question.cells} == {8}
    assert question.target.kind == "cuda"
    assert ask(["model=gpt_tiny", "strategy=ddp", "device=cpu"]).target.kind == "cpu"
    for words, sentence in (
        (["backend=gloo"], "backend=gloo: an estimate runs no ranks"),
        (["search.memory_limit=1GiB"], "zerobench plan"),
        (["device=tpu"], "device=tpu: use one of cpu, cuda"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ask(words)
    with pytest.raises(RefusedError, match="modle"):
        ask(["modle=gpt_tiny"])


@pytest.mark.slow
def test_a_given_value_stays_though_it_is_the_default_of_the_other_device() -> None:
    words = ["model=gpt_tiny", "strategy=zero1", "optimizer=adagrad", "optimizer.implementation=auto,fused"]
    cells = ask([*words, "precision.tile_bytes=null,4MiB"]).cells
    found = [(one.config.optimizer.implementation, one.config.precision.tile_bytes) for one in cells]
    small, large = 4 * 2**20, 256 * 2**20
    assert found == [("foreach", large), ("foreach", small), ("fused", large), ("fused", small)]
    assert len({one.cell_id for one in cells}) == 4
    assert len(ask([*words[:-1], "optimizer.implementation=auto,foreach"]).cells) == 1, "the same cell"
    on_host = ask([*words[:-1], "offload=cpu"]).cells[0].config
    assert (on_host.optimizer.implementation, on_host.precision.tile_bytes) == ("fused", small), "a CPU updates"
    for target in ("cpu", "cuda"):
        in_one_pass = Bf16(tile_bytes=0)
        sgd = cell("zero1", 2, target=target, precision=in_one_pass, optimizer=Sgd(momentum=0.9)).config
        assert sgd.precision.tile_bytes == TILE_BYTES[target], "there is no kernel for it"
    fused = cell("zero1", 2, target="cuda", buffers=FusedBuffers()).config
    assert fused.precision.tile_bytes is None, "it follows from another key"


def row(name: str, **more: Any) -> SimulatedCell:
    return SimulatedCell(cell(name, 8), name=name, **more)


def test_tables_and_csv_say_what_fits_and_what_failed(tmp_path: Path) -> None:
    parts = dict.fromkeys(PARTS, 0) | {"parameters": 2**30, "loss": 3 * 2**30}
    tensor = LargeTensor(2**30, "loss", "", "", "8x128", "train.py:3 in f")
    rows = [
        row("zero3", peak_bytes=2**32, parts_bytes=parts, states_bytes=2**30, psi=7, tensors=(tensor, tensor)),
        row("deepspeed_zero3", problem="strategy=deepspeed_zero3: needs deepspeed"),
    ]
    lacking = [row(name, problem="transformers is not installed") for name in ("ddp", "zero1")]
    assert as_table([*rows, *lacking], None).count("transformers is not installed") == 1
    assert "ddp, zero1: transformers is not installed" in as_table([*rows, *lacking], None)
    text = as_table(rows, 2**31)
    assert "tiny, 7 parameters, N = 8, micro-batch 4, sequence 32" in text
    assert all(words in text for words in ("2 × 1.00 GiB", "-2.00 GiB", "deepspeed_zero3: strategy="))
    tail = "too much; the largest part of its peak: loss, 3.00 GiB"
    assert verdict(rows[0], 2**31) == f"zero3: does not fit 2.00 GiB: its peak is 4.00 GiB, 2.00 GiB {tail}"
    assert verdict(rows[0], 2**32) == ""
    more = replace(rows[0], allocated_bytes=2**32, reserved_low_bytes=5 * 2**30, reserved_high_bytes=2**33)
    said = verdict(more, 6 * 2**30)
    assert said.startswith("zero3: does not fit 6.00 GiB: its allocator reserves up to 8.00 GiB, 2.00 GiB too much;")
    assert "at least 5.00 GiB, as a rule with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said
    assert "at least" not in verdict(more, 4 * 2**30)
    assert verdict(more, 2**33) == ""
    assert "-2.00 GiB" in as_table([more], 6 * 2**30), "what is left counts what the allocator reserves"
    first, second = csv.DictReader(as_csv(rows, None).splitlines())
    assert [int(first[f"{key}_bytes"]) for key in ("peak", "loss", "largest")] == [2**32, 3 * 2**30, 2**30]
    assert (second["peak_bytes"], second["problem"]) == ("", "strategy=deepspeed_zero3: needs deepspeed")
    draw(rows[:1], tmp_path / "bars.svg", "a title", 2**31)
    drawn = (tmp_path / "bars.svg").read_text()
    assert "stroke-dasharray" in drawn
    with pytest.raises(ValueError, match="no cell has an estimate"):
        draw([], tmp_path / "none.svg", "")
