"""Questions of users, a command for each, and its output: PyTorch's list of questions on memory, pull request 125323 of
pytorch/pytorch, in our words; questions on adapters and on long sequences.

    python tools/docs/questions.py [--again] [--only t1,l2]

Runs every command that has no output on record yet (--again: all), and writes what it printed to RECORDED. The pages
docs/how-to/memory-questions.md, lora.md and long-sequences.md show these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerobench import cli

HERE = Path(__file__).resolve().parents[2]
RECORDED = Path("results/published/questions")

COLUMNS = "120"
"""Width of the recorded outputs."""

SIZE = "model=gpt_small precision=bf16 sequence=512"
EIGHT = f"{SIZE} world_size=8"

EIGHT_OF = "precision=bf16 world_size=8 micro_batch=1"
FROZEN_33B = (
    "model=gpt model.layers=105 model.hidden=5120 model.heads=40 model.vocabulary=151936 model.lora=96 sequence=512 "
    "precision=bf16 activation=checkpoint"
)
"""The sizes of OpenTau's pull request 446: 33B frozen parameters beside 0.9B trained ones."""

LONG = f"model=gpt_7b model.layers=2 model.positions=131072 {EIGHT_OF} activation=checkpoint strategy=zero3"
IN_PARTS = "model.loss_chunks=64 model.mlp_chunks=16"

SECTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "memory_questions": (("t", "## Tuning"), ("d", "## Debugging")),
    "lora_questions": (("l", ""),),
    "long_sequences": (("s", ""),),
}
"""Block of a page -> letter and heading of its sections."""

LISTED = "memory_questions"
"""The block of PyTorch's list."""


@dataclass(frozen=True)
class Question:
    """`number`: in its list, after a section's letter in SECTIONS. `reading`: how to read the answer off the output."""

    number: str
    text: str
    command: str
    reading: str


QUESTIONS = (
    Question(
        "t1", "What peak is to be expected of this configuration?", f"zerobench estimate {EIGHT} strategy=fsdp2",
        "The first row; below it the parts of the peak at that instant. *reserved* is what a GPU shows as in use.",
    ),
    Question(
        "t2", "What does another wrapping into FSDP units do to the peak?",
        f"zerobench estimate {EIGHT} strategy=zero3 micro_batch=1 model.tiles=1,4 --tensors 0",
        "With ZeRO-3, whose units are those of FSDP2: a unit is a block; with `model.tiles` each tile of its MLP's "
        "matrices is one too. The wrapping decides the bytes in flight.",
    ),
    Question(
        "t3", "Which batch size is best?",
        f'zerobench estimate {EIGHT} strategy=fsdp2 micro_batch=1,2,4,8 --device-memory "1 GiB" --tensors 0',
        "The largest that fits, and by how much; which one trains fastest under a limit is measured: "
        "[a memory cap](memory-cap.md).",
    ),
    Question(
        "t4", "How long can sequences be?",
        "zerobench estimate model=gpt_small precision=bf16 world_size=8 strategy=fsdp2 micro_batch=1 "
        'sequence=1024,2048,4096,8192 --device-memory "1 GiB" --tensors 0',
        "Attention is fused: memory grows linearly with the sequence; with `--attention math`, quadratically.",
    ),
    Question(
        "t5", "What does the number of data-parallel ranks do to the peak?",
        f"zerobench estimate {SIZE} strategy=fsdp2 world_size=8,64 --tensors 0",
        "Parameters and optimizer states shrink with N; activations, and what is in flight, do not.",
    ),
    Question(
        "t6", "How much does an optimizer on the CPU save?",
        f"zerobench estimate {EIGHT} strategy=zero3 offload=none,cpu_optimizer --tensors 0",
        "The second column lacks masters and optimizer states; with `offload=cpu` gradients leave as well.",
    ),
    Question(
        "t7", "Which activation policy should be used?",
        f"zerobench estimate {EIGHT} strategy=fsdp2 activation=none,selective,checkpoint "
        "--tensors 0",
        "Each policy recomputes more than the one before; `activation=offload` and "
        "`activation=checkpoint_offload` wait for the bus instead.",
    ),
    Question(
        "t8", "How do selective policies compare?",
        f"zerobench estimate {EIGHT} strategy=fsdp2 activation=selective,checkpoint --tensors 4",
        "One selective policy is built in, torchtitan's by operators; write another one into your own model, as in "
        "question 9.",
    ),
    Question(
        "t9", "Can units have different policies?",
        "python examples/recompute_some_blocks.py estimate model=mixed model.recomputed=0,2 strategy=fsdp2 "
        "precision=bf16 sequence=512 world_size=8 --tensors 0",
        "Your own model decides block by block; here no block, or the first 2 of 4 blocks are recomputed.",
    ),
    Question(
        "t10", "What does a gradient reduction in fp32 cost?",
        f"zerobench estimate {EIGHT} strategy=fsdp2 micro_batch=1 precision.wire_dtype=bf16,fp32 --tensors 0",
        "Compare three rows: communication at the peak, states in flight, and bytes sent per step.",
    ),
    Question(
        "t11", "What does another mixed-precision policy do to the peak?",
        f"zerobench estimate {EIGHT} strategy=zero3 precision.gradient_dtype=bf16,fp32 --tensors 0",
        "Parameters, gradients and their reduction have a dtype each: `precision`, `precision.gradient_dtype`, "
        "`precision.wire_dtype`.",
    ),
    Question(
        "t12", "When is hybrid sharding (HSDP) worth it?",
        f"zerobench estimate {SIZE} world_size=64 strategy=zero3 shard_group=8,64 --tensors 0",
        "A smaller group needs more memory per rank, but its gathers stay inside the group; only an all-reduce of a "
        "shard leaves it. Choose the smallest group that fits.",
    ),
    Question(
        "t13", "Can parameters be resharded to a smaller mesh without a much higher peak?",
        f"zerobench estimate {SIZE} world_size=64 node_size=8 strategy=zero3 zeropp=none,hpz --tensors 0",
        "hpZ keeps a second shard per node, from which backward gathers: FSDP2's `reshard_after_forward=8`.",
    ),
    Question(
        "t14", "Can resharding after forward be left out without running out of memory?",
        f'zerobench estimate {EIGHT} strategy=fsdp2,fsdp2_no_reshard --device-memory "1 GiB" --tensors 0',
        "The second column keeps parameters whole between forward and backward, and sends less.",
    ),
    Question(
        "d1", "Which module has the most activations?",
        f"zerobench estimate {EIGHT} strategy=fsdp2 --tensors 8",
        "The table below: the largest tensors at the peak, the module and the line of code that made each. In a loop "
        "of your own: [watch](watch.md).",
    ),
    Question(
        "d2", "Which unit holds much unsharded memory?",
        f"zerobench estimate {EIGHT} strategy=zero3 micro_batch=1 strategy.reshard_after_forward=true,false "
        "--tensors 6",
        "Gathered parameters and unsharded gradients have the name of their unit.",
    ),
    Question(
        "d3", "Is activation checkpointing releasing no memory?",
        f"zerobench estimate {EIGHT} strategy=fsdp2 activation=none,checkpoint --tensors 4",
        "With checkpointing only one block's tensors are in the second list; if there are several blocks, nothing is "
        "released.",
    ),
    Question(
        "l1", "What do adapters save?",
        f"zerobench estimate model=gpt_medium {EIGHT_OF} sequence=512 strategy=zero2,zero3 model.lora=0,8 --tensors 0",
        "Only the adapters have gradients, masters and optimizer states. Parameters include the frozen model: whole "
        "under ZeRO-2, partitioned under ZeRO-3. ψ counts only the adapters, so ZeRO-3's volume in ψ is large; *sent "
        "a step* shows the bytes.",
    ),
    Question(
        "l2", "Which stage for a frozen base of 33B?",
        f'zerobench plan --device-memory "80 GiB" --gpus 8 {FROZEN_33B} strategy=zero2,zero3 offload=none',
        "The base is replicated by ZeRO-2, 2 bytes per parameter, and divided by N by ZeRO-3: "
        "[OpenTau](https://github.com/TensorAuto/OpenTau/pull/446) saw 66 GB and 8 GB for it on eight GPUs. "
        "If it fits, ZeRO-2 is preferred, because it sends only adapters, and ZeRO-3 the whole base twice. On GPUs of "
        "40 GiB only ZeRO-3 fits.",
    ),
    Question(
        "l3", "Which stage does a plan choose for a frozen base?",
        'zerobench plan --device-memory "256 MiB" --gpus 8 model=gpt_medium model.lora=8 sequence=512 '
        "strategy=zero2,zero3 offload=none activation=none",
        "The same question for a small model, on devices of 256 MiB, where ZeRO-2 does not fit. If both fit, the "
        "plan chooses ZeRO-2, which sends almost nothing; `--goal largest_batch` shows which one has room for a larger "
        "batch.",
    ),
    Question(
        "l4", "What does FSDP2 hold beyond ours?",
        f"zerobench estimate model=gpt_medium {EIGHT_OF} sequence=512 strategy=fsdp2 strategy.upcast_frozen=true,false "
        "model.lora=8 --tensors 0",
        "With `upcast_frozen` the frozen shards are fp32, 2 bytes more per parameter and shard: accelerate's "
        "[#3844](https://github.com/huggingface/accelerate/issues/3844), fixed in "
        "[#3848](https://github.com/huggingface/accelerate/pull/3848). With `upcast_frozen=false`, most of the "
        "difference from our ZeRO-3 (question 1) is FSDP2's gather buffers.",
    ),
    Question(
        "s1", "What binds from 16k to 128k tokens?",
        f"zerobench estimate {LONG} sequence=16384,32768,65536,131072 --tensors 1",
        "Blocks are recomputed, so each keeps only its input. Logits and the loss, 12·s·b·V bytes in fp32, are "
        "most of it and grow with the sequence.",
    ),
    Question(
        "s2", "And with the loss in parts?",
        f"zerobench estimate {LONG} sequence=16384,32768,65536,131072 model.loss_chunks=64 --tensors 1",
        "No tensor is as wide as the vocabulary and as long as the sequence. From 64k tokens on, the "
        "largest is the inner layer of the recomputed block's MLP; below that, a buffer of the root unit.",
    ),
    Question(
        "s3", "And with the MLP in parts as well?",
        f"zerobench estimate {LONG} sequence=16384,32768,65536,131072 {IN_PARTS} --tensors 1",
        "Inputs of the blocks, 2·s·b·h bytes each, and queries, keys and values of one block are left.",
    ),
    Question(
        "s4", "And with the blocks' inputs in host memory?",
        f"zerobench estimate {LONG.replace('=checkpoint', '=checkpoint_offload')} sequence=131072 {IN_PARTS} "
        "--tensors 3",
        "With two blocks this saves nothing, because two inputs of 1 GiB each are on the device at a time; with more "
        "blocks all others are in host memory. The limit is one block's attention: for a longer sequence, ranks would "
        "have to divide it.",
    ),
)  # fmt: skip

ESTIMATE = Question(
    "estimate", "Which strategy, will it fit, what is the largest part?",
    "zerobench estimate model=gpt2_124m precision=bf16 sequence=1024 strategy=ddp,zero1,zero2,zero3,fsdp2 --tensors 2",
    "",
)  # fmt: skip
"""The example of docs/how-to/estimate.md."""


def record(question: Question) -> int:
    """Runs the command and writes its output. Returns the exit code; nothing is written where it failed."""
    words = shlex.split(question.command)
    code, said = printed(words[1:]) if words[0] == "zerobench" else printed_by(words[1:])
    if code == 0:
        path = HERE / RECORDED / f"{question.number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        said = "\n".join(line.rstrip() for line in said.splitlines()).strip("\n")
        path.write_text(f"$ {question.command}\n\n{said}\n")
    else:
        print(f"{question.number}: exit code {code}: {said.strip()[-500:]}", file=sys.stderr)
    return code


def printed(words: list[str]) -> tuple[int, str]:
    """The exit code and output of `zerobench WORDS`, run in this process, which has imported torch."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli.run(words)
    return code, said.getvalue()


def printed_by(words: list[str]) -> tuple[int, str]:
    """The exit code and output of `python WORDS`."""
    done = subprocess.run([sys.executable, *words], cwd=HERE, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


def main() -> int:
    """Records what is missing. Exit code 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run all commands")
    parser.add_argument("--only", help="of these numbers, comma-separated, as t1,d2")
    chosen = parser.parse_args()
    os.environ["COLUMNS"] = COLUMNS
    codes = []
    for question in (*QUESTIONS, ESTIMATE):
        if chosen.only is not None and question.number not in chosen.only.split(","):
            continue
        if not recorded(question) or chosen.again:
            print(f"{question.number}: {question.command}", file=sys.stderr, flush=True)
            codes.append(record(question))
    return int(any(codes))


def recorded(question: Question) -> str:
    """Returns what the command printed, empty if nothing of this command is on record."""
    path = HERE / RECORDED / f"{question.number}.txt"
    first, _, said = path.read_text().partition("\n\n") if path.is_file() else ("", "", "")
    return said.rstrip("\n") if first == f"$ {question.command}" else ""


def page(block: str) -> str:
    """The questions of a page's block: of PyTorch's list a table with links to the outputs, of others each output."""
    return _table() if block == LISTED else _outputs(block)


def _outputs(block: str) -> str:
    sections = []
    for letter, title in SECTIONS[block]:
        sections += [title] * bool(title)
        for question in QUESTIONS:
            if question.number.startswith(letter):
                said = recorded(question) or "not on record yet; python tools/docs/questions.py runs it"
                heading = f"### {question.number[1:]}. {question.text}"
                sections.append(
                    f"{heading}\n\n```bash\n{question.command}\n```\n\n```text\n{said}\n```\n\n{question.reading}"
                )
    return "\n\n".join(sections)


def _table() -> str:
    sections = []
    for letter, title in SECTIONS[LISTED]:
        lines = [title, "", "| | question | command | answer |", "| --: | --- | --- | --- |"]
        for question in QUESTIONS:
            if question.number.startswith(letter):
                output = f"[output]({RECORDED}/{question.number}.txt)" if recorded(question) else "not recorded yet"
                number = question.number[1:]
                lines.append(f"| {number} | {question.text} | `{question.command}` | {question.reading} {output} |")
        sections.append("\n".join(lines))
    first = QUESTIONS[0]
    return "\n\n".join([*sections, "## The first output", f"```text\n$ {first.command}\n\n{recorded(first)}\n```"])


if __name__ == "__main__":
    sys.exit(main())
