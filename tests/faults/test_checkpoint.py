"""Checkpoints that were damaged, interrupted or made to harm: refused in a sentence, and the last good one stays."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerobench
from tests import zoo
from tests.unit.test_checkpoint import data_file, engine_of, net, same, saved_in, state_of, step
from zerobench.zero import LossScaling, Offload
from zerobench.zero.checkpoint.storage import INDEX


def edit_index(folder: Path, **changes: object) -> None:
    whole = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**whole, **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: os.truncate(data_file(f), 100), r"rank0-.*: it has 100 bytes, but the index says \d+"),
    "missing": (lambda f: data_file(f).unlink(), r"rank0-.*: it is missing"),
    "no index": (lambda f: (f / INDEX).unlink(), f"good: it is not a checkpoint: it has no {INDEX}"),
    "not there": (shutil.rmtree, "good: it is not a checkpoint"),
    "index cut": (lambda f: os.truncate(f / INDEX, 400), "not the index of a checkpoint, or a damaged one"),
    "another json": (lambda f: (f / INDEX).write_text("[1]"), "not the index of a checkpoint, or a damaged one"),
    "newer": (lambda f: edit_index(f, version=9), "of version 9, and this zerobench reads .* of version 4"),
    "index of 2 GiB": (
        lambda f: os.truncate(f / INDEX, 2**31),
        r"it has 2,147,483,648 bytes; for a model of \d+ tensors",
    ),
    "a key twice": (lambda f: (f / INDEX).write_text('{"facts": 1, "facts": 2}'), "it has 'facts' twice"),
    "another format": (lambda f: edit_index(f, format="tea"), "its format is 'tea' of version 4"),
}


def forge(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """An index with other facts and files."""

    def apply(folder: Path) -> None:
        whole = json.loads((folder / INDEX).read_text())
        change(whole)
        edit_index(folder, **whole)

    return apply


def forge_file(
    change: Callable[[dict[str, torch.Tensor]], object], index: Callable[[dict], object] = lambda whole: None
) -> Callable[[Path], object]:
    """A file with other tensors, and an index that has its size, and other facts."""

    def apply(folder: Path) -> None:
        path = data_file(folder)
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        forge(index)(folder)
        edit_index(folder, files={path.name: path.stat().st_size})

    return apply


WEIGHT = "master.0.weight[0:]"
STATE = "optimizer.0.weight.exp_avg[0:]"


def link_outside(name: Callable[[Path], Path]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = name(folder)
        path.rename(folder.parent / path.name)
        path.symlink_to(folder.parent / path.name)

    return apply


def group_of(contents: dict) -> dict:
    return contents["facts"]["optimizer"]["options"][0]


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a chunk too many": (
        forge_file(lambda t: t.update({"master.0.weight[7:]": t[WEIGHT].clone()})),
        "overlap or leave a gap",
    ),
    "a gap": (forge_file(lambda t: t.update({"master.0.weight[3:]": t.pop(WEIGHT)})), "leave a gap at element 0"),
    "no chunks": (forge_file(lambda t: t.pop(WEIGHT)), "end at element 0 of 35"),
    "another numel": (forge_file(lambda t: t.update({WEIGHT: t[WEIGHT][1:].clone()})), "end at element 34 of 35"),
    "a tensor of nothing": (forge_file(lambda t: t.update({"x[0:]": t[WEIGHT].clone()})), r"it has 'x\[0:\]', which"),
    "a name of none": (forge_file(lambda t: t.update({"x": t[WEIGHT].clone()})), "it has 'x', which"),
    "files elsewhere": (forge(lambda c: c["files"].update({"../x": 1})), "it names '../x', which is not a file"),
    "a file of no name": (forge(lambda c: c["files"].update({"": 1})), "good: it is missing"),
    "facts null": (forge(lambda c: c.update(facts=None)), "a damaged one"),
    "extra null": (forge(lambda c: c["facts"].update(extra=None)), "extra: None in the checkpoint"),
    "a shape of text": (forge(lambda c: c["facts"]["parameters"]["0.weight"].update(shape=["7", 5])), "a damaged one"),
    "a shape that is true": (forge(lambda c: c["facts"]["parameters"]["0.weight"].update(shape=[True, 35])), "shape"),
    "groups a list": (forge(lambda c: c["facts"]["optimizer"].update(groups=[])), "a damaged one"),
    "lr that is true": (forge(lambda c: group_of(c).update(lr=True)), "lr of group 0 is True"),
    "betas of one": (forge(lambda c: group_of(c).update(betas={"tuple": [0.9]})), "a step with the options and states"),
    "amsgrad without its states": (forge(lambda c: group_of(c).update(amsgrad=True)), "raises KeyError"),
    "lr of 400 digits": (forge(lambda c: group_of(c).update(lr=10**400)), "a step with the options and states"),
    "no step": (forge(lambda c: c["facts"]["optimizer"]["states"]["0.weight"].pop("step")), "raises KeyError"),
    "a state of another dtype": (
        forge_file(
            lambda t: t.update({STATE: t[STATE].half()}),
            lambda c: c["facts"]["optimizer"]["states"]["0.weight"]["exp_avg"].update(elements="float16"),
        ),
        "a step with|its state exp_avg is float16",
    ),
    "lr null": (forge(lambda c: group_of(c).update(lr=None)), "lr of group 0 is None"),
    "an unknown option of no kind": (forge(lambda c: group_of(c).update(new={"x": 1})), "a damaged one .*'tensor'"),
    "no user": (forge(lambda c: c["facts"].pop("user")), "a damaged one .*'user'"),
    "user a list": (forge(lambda c: c["facts"].update(user=[1])), "a damaged one .*its user state is a list"),
    "steps in words": (forge(lambda c: c["facts"]["extra"].update(steps="x")), "extra: steps is 'x'"),
    "version true": (lambda f: edit_index(f, version=True), "of version True"),
    "deep": (lambda f: (f / INDEX).write_text("[" * 5000), "not the index of a checkpoint, or a damaged one"),
    "the file a link": (link_outside(data_file), "it is a link to .* outside of the checkpoint"),
    "the index a link": (link_outside(lambda f: f / INDEX), "it is a link to .* outside of the checkpoint"),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *FORGERIES])
def test_a_damaged_or_forged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    (change, words), saved = (DAMAGE | FORGERIES)[kind], saved_in(tmp_path)
    engine = engine_of(net(), strategy="zero3" if kind in DAMAGE else "zero2")
    step(engine, 1)
    before = state_of(engine)
    change(saved)
    with pytest.raises(ValueError, match=words) as refusal:
        engine.load(saved)
    assert "\n" not in str(refusal.value)
    assert same(state_of(engine), before)


def pending_of(contents: dict) -> dict:
    return contents["facts"]["extra"]["pending"]


PENDING: dict[str, tuple[Callable[[dict], object], str]] = {
    "no facts": (lambda c: c["facts"]["extra"].pop("pending"), "a damaged one .*'pending'"),
    "facts null": (lambda c: c["facts"]["extra"].update(pending=None), "a damaged one"),
    "coefficient in words": (lambda c: pending_of(c).update(coefficient="x"), "the coefficient .* is 'x'"),
    "options of no group": (lambda c: pending_of(c).update(options=[]), "pending update: 0 parameter groups"),
    "lr in words": (lambda c: pending_of(c)["options"][0].update(lr="x"), "pending update: lr of group 0 is 'x'"),
}


@pytest.mark.parametrize("kind", PENDING)
def test_a_forged_pending_update_is_refused_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    def delayed():
        model = net()
        return zerobench.initialize(
            model, zoo.OPTIMIZERS["adamw"](model.parameters()), "zero2", offload=Offload(delayed_after=0)
        )

    change, words = PENDING[kind]
    engine, path = delayed(), tmp_path / "late"
    step(engine)
    engine.save(path)
    delayed().load(path)
    forge(change)(path)
    for other in (engine_of(net()), delayed()):
        before = state_of(other)
        with pytest.raises(ValueError, match=words):
            other.load(path)
        assert same(state_of(other), before)


@pytest.mark.parametrize("state", [{}, {"scale": None, "since": 0}])
def test_a_forged_loss_scale_is_refused_and_changes_nothing(tmp_path: Path, state: object) -> None:
    model = net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = zerobench.initialize(model, optimizer, "zero1", loss_scaling=LossScaling())
    engine.save(tmp_path / "a")
    engine.load(tmp_path / "a")
    forge(lambda c: c["facts"]["extra"].update(loss_scaler=state))(tmp_path / "a")
    with torch.no_grad(), engine.full_parameters() as module:
        module[0].weight.add_(1)
    before = state_of(engine)
    with pytest.raises(ValueError, match=r"a damaged one|extra: scale is None"):
        engine.load(tmp_path / "a")
    assert same(state_of(engine), before)


KILLS = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from tests.unit.test_checkpoint import engine_of, net, step

folder, name = Path(sys.argv[1]), sys.argv[2]
engine = engine_of(net())
step(engine)
engine.save(folder / "start" / "good")
states = {"old": engine.full_state_dict()}
step(engine, 1)
states["new"] = engine.full_state_dict()

def deadly(call):
    def wrapped(*arguments, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)
    return wrapped

def what_is_in(path):
    if not path.exists():
        return "nothing"
    fresh = engine_of(net())
    fresh.load(path)
    now = fresh.full_state_dict()
    return next(name for name, state in states.items() if all(torch.equal(now[key], state[key]) for key in now))

for at in range(1, 80, int(sys.argv[3])):
    shutil.rmtree(folder / "run", ignore_errors=True)
    shutil.copytree(folder / "start", folder / "run")
    pid = os.fork()
    if pid == 0:
        left = at
        for call in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
            setattr(os, call, deadly(getattr(os, call)))
        engine.save(folder / "run" / name)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    found = [what_is_in(folder / "run" / "good"), what_is_in(folder / "run" / name)]
    engine.save(folder / "run" / name)
    left_over = [path.name for path in (folder / "run").rglob("*") if "partial" in path.name]
    files = len(list((folder / "run" / name).iterdir()))
    print(json.dumps([killed, *found, what_is_in(folder / "run" / name), left_over, files]))
    if not killed:
        break
"""
"""Saves, killed (as by `kill -9`) at every `argv[3]`-th call that changes the disk, one after the other."""


@pytest.mark.parametrize("name", [pytest.param("other", marks=pytest.mark.thorough), "good"])
def test_a_killed_save_leaves_the_last_good_one(tmp_path: Path, name: str, thorough: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), name, "1" if thorough else "3"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(row[0] for row in rows) >= 5
    assert rows[-1][0] is False
    good = [row[1] for row in rows]
    target = [row[2] for row in rows]
    before = "old" if name == "good" else "nothing"
    assert set(target) == {before, "new"}
    assert target == sorted(target, key=["nothing", "old", "new"].index)  # whole at one instant, and never less again
    assert good == target if name == "good" else set(good) == {"old"}
    assert all(row[3:] == ["new", [], 2] for row in rows)  # the next save succeeds and clears up
