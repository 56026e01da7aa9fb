"""Words that the fuzz writes: of values, of Hydra's own keys and flags, and whole files of a config folder."""

from __future__ import annotations

from typing import Any

WORDS: dict[str, tuple[str, ...]] = {
    "strategy.accumulate": ("every", "last"),
    "strategy.mode": ("own", "paper", "vendor"),
    "strategy.reduce_with": ("reduce_scatter", "all_reduce", "null"),
    "strategy.construct": ("plain", "meta"),
    "strategy.keep_root": ("true", "false", "auto", "null"),
    "strategy.bucket_bytes": ("auto", "65536", "1MiB", "25MiB", "null"),
    "precision.gradient_dtype": ("fp32", "bf16", "fp16", "null"),
    "precision.wire_dtype": ("fp32", "bf16", "fp16", "null"),
    "optimizer.implementation": ("auto", "fused", "foreach", "loop"),
    "huggingface.architecture": ("gpt2", "llama", "opt"),
    "huggingface.loss": ("plain", "kept", "fused"),
    "measure.check_training": ("auto", "true", "false"),
    "measure.passes": ("both", "timed", "accounted"),
    "search.memory_limit": ("96MiB", "'1 GiB'", "null"),
    "search.checkpointing": ("[true]", "[false,true]", "[]"),
    "device": ("cpu", "auto", "cuda"),
    "backend": ("gloo", "auto", "simulated", "nccl"),
    "draw_on": ("cpu", "device"),
    "tensors": ("real", "fake"),
    "clip_norm": ("'2'", "inf"),
    "results_dir": ("results/runs", "/tmp", "nowhere/deep"),
    "data.path": ("null", "no-such-file", "/dev/null", "/etc/hostname"),
    "offload.path": ("null", "/tmp", "/no-such-folder"),
}
"""Key -> words that it takes, or may be given by mistake."""

HOSTILE = (
    "", "null", "~", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "-0.0", "0", "0x10", "1_000", "9" * 18, "9" * 19,
    "9" * 400, "1e17", "3.7", "true", "yes", "'a b'", "''", '"\\""', "'", "[]", "[1,[2]]", "{}", "{a:1}",
    "{a:{b:[1]}}",
    "{_target_:tests.fuzz.canary.sing}", "{class:tests.fuzz.canary.Canary}", "???", "auto", "none",
    "${seed}", "${nothing}", "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "${oc.create:{a:1}}",
    "${oc.decode:'[1]'}",
    "${oc.select:model}", "${oc.dict.keys:model}", "${hydra:runtime.cwd}", "${hydra:job.num}", "${model}", "${.}",
    "${..x}", "${}", "${", "${${seed}}", "a=b", "a,b", "1,", ",", "1,2", "range(1,4)", "range(1,inf)", "range(3,1)",
    "range(0,1,0)", "choice(1,2)", "choice()", "glob(*)", "glob([a,b],exclude=c)", "interval(0,1)", "sort(3,1,2)",
    "shuffle(1,2)", "shuffle(range(1,3))", "tag(x,choice(1,2))", "sort(range(1,3),reverse=true)", "extend_list(1)",
    "int(3.7)", "int('x')", "int(1,2)", "float(1)", "bool(x)", "str(1)", "json_str('[1]')", "nope(1)", "int(",
    "é", "日本語", "\u202eabc", "\x00", "a\x00b", "\x1b[2J", "a\nb", "a\tb", "\udc80", "\ud800", "a" * 300,
    "a" * 19_000,
    "a" * 20_001, "[" * 60, "[" * 40 + "]" * 40, "{a:" * 40, "../../etc/passwd", "~/x", "~nobody-here/x", "/dev/zero",
    "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "/", "file:///x", "s3://x/y", "%s%n%d", "{0}", "$(touch x)",
    "`touch x`", "; touch x", "!!python/object/apply:os.system [x]", "*x", "&x", "|", ">", "#", "@", "1MiB", "1 MiB",
    "1e9GiB", "-1MiB", "2.5KiB", "1,2MiB", "0.0000001", "1e308", "2147483648", "9223372036854775808",
)  # fmt: skip
"""Texts in the place of a value."""


HYDRAS = (
    "hydra/launcher=joblib", "hydra/launcher=basic", "hydra/launcher=nothing", "hydra/launcher=submitit_slurm",
    "hydra/sweeper=optuna", "hydra/sweeper=basic", "hydra/sweeper=nothing", "hydra.launcher.n_jobs=2",
    "hydra.launcher._target_=tests.fuzz.canary.sing", "hydra.sweeper._target_=tests.fuzz.canary.sing",
    "+hydra.callbacks.x._target_=tests.fuzz.canary.sing", "hydra.run.dir=x", "hydra.sweep.subdir=/x",
    "hydra.job.chdir=true", "hydra.output_subdir=x",
    "hydra.verbose=true",
    "hydra.verbose=[tests]", "hydra.mode=RUN", "hydra.mode=x", "hydra.mode=null", "hydra.sweeper.params=null",
    "hydra.sweeper.params={seed:'1,2'}", "hydra.sweeper.params.strategy='ddp,zero1'", "hydra.sweeper.params=[1]",
    "hydra.sweeper.params.x=[1,2]", "hydra.sweeper.max_batch_size=1", "hydra={}", "hydra=null", "+hydra.x=1",
    "hydra/job_logging=disabled", "hydra/help=x", "hydra.runtime.choices.model=x", "hydra.overrides.task=[x]",
    "launch.retry=[crash,timeout,oom]", "launch.retry=[x]", "launch.group_by=[model]", "launch.group_by=x",
    "objective=peak_bytes", "objective=x", "launch.timeout_s=0", "launch.threads=-1",
)  # fmt: skip

FLAGS = (
    "--cfg", "--cfg=job", "--cfg=hydra", "--cfg=x", "--info", "--info=all", "--info=defaults-tree", "--info=x",
    "--package=x", "--resolve", "--config-name=other", "--config-path=/tmp", "--config-dir=/no-such-folder",
    "--config-dir=/dev/null", "--config-dir", "--experimental-rerun=config.pickle", "-cn", "--x", "-", "--", "---",
    "-m=1",
    "--shell-completion", "--hydra-help", "--config-dir=\x00", "--config-dir=" + "a" * 300, "--config-dir=.",
)  # fmt: skip


GLOBAL = "# @package _global_\n"
LAUGHS = "\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
)])  # fmt: skip

YAMLS = (
    f"{GLOBAL}seed: 3\n", f"{GLOBAL}defaults: [{{override /strategy: zero1}}]\nsequence: 16\n", f"{GLOBAL}sead: 3\n",
    f"{GLOBAL}hydra: {{mode: MULTIRUN, sweeper: {{params: {{seed: '1,2'}}}}}}\n", f"{GLOBAL}hydra: 3\n",
    f"{GLOBAL}hydra: {{sweeper: {{params: 3}}}}\n", f"{GLOBAL}hydra: {{sweeper: {{params: {{seed: [1, 2]}}}}}}\n",
    f"{GLOBAL}hydra: {{sweeper: {{params: {{'a b': '1,2'}}}}}}\n", f"{GLOBAL}hydra: null\n",
    f"{GLOBAL}hydra: {{mode: x}}\n",
    f"{GLOBAL}hydra: {{callbacks: {{x: {{_target_: tests.fuzz.canary.sing}}}}}}\n",
    f"{GLOBAL}hydra: {{launcher: {{_target_: tests.fuzz.canary.sing}}}}\n",
    f"{GLOBAL}hydra: {{sweeper: {{_target_: tests.fuzz.canary.sing}}}}\n",
    f"{GLOBAL}hydra: {{job_logging: {{version: 1, handlers: {{x: {{(): tests.fuzz.canary.sing}}}}}}}}\n",
    f"{GLOBAL}hydra: {{job_logging: {{handlers: {{x: {{class: logging.FileHandler, filename: written}}}}}}}}\n",
    f"{GLOBAL}hydra: {{hydra_logging: {{handlers: {{x: {{class: logging.FileHandler, filename: written}}}}}}}}\n",
    f"{GLOBAL}hydra: {{sweep: {{dir: elsewhere, subdir: ../../x}}, run: {{dir: there}}}}\n",
    f"{GLOBAL}hydra: {{job: {{chdir: true, env_set: {{ZEROBENCH_CANARY: sang}}}}}}\n",
    f"{GLOBAL}hydra: {{output_subdir: x}}\n",
    f"{GLOBAL}defaults: [{{override /hydra/launcher: joblib}}]\n", f"{GLOBAL}defaults: [mine]\n",
    f"{GLOBAL}defaults: 3\n",
    f"{GLOBAL}defaults: [/experiment/mine]\n", f"{GLOBAL}defaults: [../../etc/passwd]\n",
    f"{GLOBAL}defaults: [nothing]\n",
    f"{GLOBAL}defaults: [{{override /strategy: nothing}}]\n", f"{GLOBAL}defaults: [{{/model@hydra: gpt_tiny}}]\n",
    f"{GLOBAL}defaults: [/experiment/deep/er]\n", f"{GLOBAL}model: {{_target_: tests.fuzz.canary.sing}}\n",
    f"{GLOBAL}model: null\n", f"{GLOBAL}model: 3\n", f"{GLOBAL}model: [1]\n", f"{GLOBAL}strategy: null\n",
    f"{GLOBAL}data: x\n",
    f"{GLOBAL}measure: null\n", f"{GLOBAL}launch: 3\n", f"{GLOBAL}search: []\n", f"{GLOBAL}results_dir: null\n",
    f"{GLOBAL}results_dir: 3\n", f"{GLOBAL}strategy: {{name: zero9}}\n", f"{GLOBAL}model: {{kind: nothing}}\n",
    f"{GLOBAL}optimizer: {{name: '???'}}\n", f"{GLOBAL}precision: {{name: int8}}\n", f"{GLOBAL}data: {{name: []}}\n",
    f"{GLOBAL}seed: ${{seed}}\n", f"{GLOBAL}seed: ${{oc.env:HOME}}\n", f"{GLOBAL}x: ${{x}}\nseed: 1\n",
    f"{GLOBAL}seed: .nan\n",
    f"{GLOBAL}clip: .inf\n", f"{GLOBAL}clip: .nan\n", f"{GLOBAL}seed: {'9' * 5000}\n", f"{GLOBAL}{LAUGHS}\n",
    f"{GLOBAL}x: {'[' * 3000}", f"{GLOBAL}seed: !!python/object/apply:tests.fuzz.canary.sing []\n",
    f"{GLOBAL}a: &a [*a]\n",
    f"{GLOBAL}seed: 1\nseed: 2\n", f"{GLOBAL}1: 2\n", f"{GLOBAL}true: x\n", f"{GLOBAL}null: x\n",
    f"{GLOBAL}? [1, 2]\n: 3\n",
    f"{GLOBAL}2026-01-01: 2026-01-01\n", f"{GLOBAL}'': 1\n", f"{GLOBAL}'a.b': 1\n", f"{GLOBAL}'${{seed}}': 1\n",
    f"{GLOBAL}seed: 0o17\nsequence: 0x10\nbatch: 1_0\n", f"{GLOBAL}seed: 12:30\n", f"{GLOBAL}seed: !!binary aGk=\n",
    "", "3", "[1, 2]", "- seed: 1", "seed", "\x00", "\t", "seed: [", "%YAML 9.9\n---\nseed: 1", "--- 1\n--- 2\n",
    "\ufeffseed: 1\n",
    "# @package x.y\nseed: 1\n", "# @package\n", "# @package hydra\nmode: RUN\n", "# @package _group_\nname: x\n",
    "defaults: [gpt_tiny]\n", "defaults: [schema/model/gpt]\nlayers: 1\n",
    "defaults: [/schema/model/gpt]\nlayers: 2\nhidden: 64\nheads: 2\n",
    "defaults: [/schema/strategy/zero1]\nname: ddp\n", "name: x\n", "kind: gpt\n", "layers: -1\n", "layers: x\n",
    "_target_: tests.fuzz.canary.sing\n", "defaults: [/schema/model/gpt, mine]\n", "defaults:\n- _self_\n- _self_\n",
)  # fmt: skip
"""Contents of files in a config folder."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x",
    "x" * 10_000, "\ud800", "\x00", "\x1b[2J", "../../etc/passwd", "/dev/zero", "é", "${seed}", "None", "nan",
    "1e999", "9" * 5000,
    [], [1], ["a"], [[]], [None], {}, {"a": 1}, {"": None}, {"name": 3}, {"kind": []}, [float("nan")],
    {"a": {"b": {"c": []}}},
)  # fmt: skip
"""Values in files, in the place of others."""

TEXTS: tuple[bytes, ...] = (
    b"", b"\x00" * 64, b"\xff\xfe", b"null", b"[]", b"{}", b"3", b'"x"', b"[" * 3000, b'{"a":' * 3000, b"9" * 6000,
    b"NaN",
    b"{", b"a: &a [*a]", b"!!python/object/apply:tests.fuzz.canary.sing []", b"- [1, 2", b"\x80\x04.",
    b"PK\x03\x04", b"PAR1",
    b"\x1f\x8b\x08\x00", b"\xef\xbb\xbf{}", b"a,b\n1,2\n", b"id\n", b'"', b"\r\n", b"\n\n\n",
    "\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1,
    30))]).encode(),
)  # fmt: skip
"""Whole contents of files."""
