"""A job's secret: who comes by it, and what a stranger who can connect to the job's store gets of the job: nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from zerobench.cluster import munge, secret
from zerobench.cluster.job import Job, JobContext, JobError, joined
from zerobench.cluster.seal import ForeignError, Seal
from zerobench.cluster.secret import VARIABLE, Offer, SecretError, offer, take
from zerobench.cluster.store import ForgedError, Greeter, Heartbeat, HeartbeatMonitor, JobStore
from zerobench.launch import follower

TEXT = "drawn at random: 7d1c"
SEAL = Seal(b"secret", "run/0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home and temporary folder, with a file system that shows new files at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(secret, "FILE_S", 0.0)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "cache/zerobench/jobs"


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def job(home: Path, server: TCPStore) -> Iterator[list[JobContext]]:
    contexts = [JobContext(Job(n, 2, n, "127.0.0.1", server.port, True, "run/0", "host"), "the code") for n in range(2)]
    yield contexts
    for one in contexts:
        one.heartbeat.stop()
        one.stop_joining()


def put(store: Store, key: str, value: str) -> None:
    """Sets a value that is there, for all connections, when this returns."""
    store.set(key, value)
    store.check([key])


def test_a_seal_opens_for_its_name_and_secret_alone() -> None:
    for data in (b"", b"x", bytes(range(256)) * 1000):
        sealed = SEAL.close("order/1", data)
        assert SEAL.open("order/1", sealed) == data
        assert Seal(b"secret", "run/0").open("order/1", sealed) == data
        flipped = bytes([*sealed[:5], sealed[5] ^ 1, *sealed[6:]])
        others = (Seal(b"secret", "run/1"), "order/1", sealed), (Seal(b"other", "run/0"), "order/1", sealed)
        for seal, name, value in (
            *others,
            (SEAL, "order/2", sealed),
            (SEAL, "order/1", flipped),
            (SEAL, "order/1", b""),
        ):
            with pytest.raises(ForeignError):
                seal.open(name, value)
    once, again = (SEAL.close("order/1", b"the same words, twice over") for _ in range(2))
    assert once[16:] != again[16:]
    assert b"words" not in once


def test_a_stranger_reads_nothing(job: list[JobContext], server: TCPStore) -> None:
    job[0].store.post("order/1", {"worker": "run_rank", "path": "/home/user"})
    stranger = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    names = [name for name in stranger.list_keys() if "/came/" not in name and not name.endswith("/rounds")]
    assert len(names) >= 5  # the store tells all names
    assert len(names) == stranger.num_keys() - 3
    for name in names:
        value = b64decode(stranger.get(name).partition(b" ")[2])
        if "/hello/" in name:
            assert re.fullmatch("[0-9a-f]{16}", json.loads(zlib.decompress(value)))  # a name, drawn at random
            continue
        if name.endswith("/offer"):
            assert set(json.loads(zlib.decompress(value))) == {"ways", "session", "credential"}
            continue
        with pytest.raises(zlib.error):
            zlib.decompress(value)
    with pytest.raises(
        ForgedError, match=r"^the value of order/1 in the job's store at 127.* not have the job's secret"
    ):
        JobStore("127.0.0.1", server.port, job[0].prefix).read("order/1")


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False])
def test_a_strangers_order_is_not_carried_out(job: list[JobContext], server: TCPStore, sealed: bool) -> None:
    stranger = JobStore("127.0.0.1", server.port, job[0].prefix)
    stranger.seal = Seal(b"a guess", "run/0 ") if sealed else None
    stranger.post("order/1", {"worker": "run_rank", "jobs": [{}, {}], "timeout_s": 1})
    with pytest.raises(ForgedError, match="a stranger writes there"):
        follower._next_order(job[1])


def test_a_value_moved_to_another_name_is_foreign(job: list[JobContext], server: TCPStore) -> None:
    job[0].store.post("order/1", None)
    raw = PrefixStore(job[0].prefix, TCPStore("127.0.0.1", server.port, wait_for_workers=False))
    put(raw, "left/0", raw.get("order/1").decode())
    with pytest.raises(ForgedError, match="the value of left/0 "):
        job[1]._why_absent(0)
    for value in ("", "2 QQ==", "x QQ==", "1 no base 64", "-1 QQ=="):
        put(raw, "off/1", value)
        with pytest.raises(ForgedError):
            job[1].store.read("off/1")


def test_a_stranger_does_not_join(job: list[JobContext], server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a secret of its own, nor as a rank 0 that offers one."""
    asked = replace(job[0].job, world_size=3)
    stranger = JobStore("127.0.0.1", server.port, job[0].prefix)
    stranger.seal = Seal(b"a guess", "run/0 ")
    stranger.post("info/2", {"rank": 2})
    job[0].job = asked
    with pytest.raises(ForgedError, match="the value of info/2 "):
        _ = job[0].membership
    door = Greeter(JobStore("127.0.0.1", server.port, "zerobench/false"), 2)
    false = JobStore("127.0.0.1", server.port, f"zerobench/false/{door.number}")
    false.post("offer", {"ways": ["file"], "session": "ab" * 16, "credential": None})
    with (
        pytest.raises(JobError, match="rank 0's secret of the job is neither in"),
        joined(replace(job[1].job, run="false"), "code"),
    ):
        pass
    door.stop()


@pytest.mark.slow
def test_an_old_beat_is_none(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerobench.cluster.store.BEAT_S", 0.01)
    mine = JobStore("127.0.0.1", server.port, "test")
    mine.seal = SEAL
    raw = PrefixStore("test", TCPStore("127.0.0.1", server.port, wait_for_workers=False))
    heartbeat, monitor = Heartbeat(mine, 1), HeartbeatMonitor(mine, silence_s=0.0)
    raw.wait(["heartbeat/1"])
    old = raw.get("heartbeat/1").decode()
    heartbeat.stop()
    assert not monitor.silent(1)
    last = monitor._heard[1].beat
    put(raw, "heartbeat/1", old)
    monitor._heard[1].asked = 0.0
    assert monitor.silent(1)
    assert monitor._heard[1].beat == last > 0


def test_the_way_by_file(home: Path) -> None:
    made, drawn = offer({"XDG_CACHE_HOME": str(home.parents[1])}, "/no/munge")
    path = home / made.session
    assert (made.ways, path.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (("file",), 0o600, 0o700)
    assert take(made, os.environ, "/no/munge") == drawn
    for spoil in (lambda: path.chmod(0o640), lambda: (path.chmod(0o600), home.chmod(0o777))):
        spoil()
        with pytest.raises(SecretError, match=rf"neither in {home} nor in .*; set {VARIABLE} to one text"):
            take(made, os.environ, "/no/munge")
    home.chmod(0o700)
    assert take(made, os.environ, "/no/munge") == drawn
    path.rename(home / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(SecretError):
        take(made, os.environ, "/no/munge")
    path.unlink()
    (home / "elsewhere").rename(path)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(SecretError):
            take(made, os.environ, "/no/munge")
    secret.forget(made.session, os.environ)
    assert list(home.iterdir()) == []


def test_files_of_killed_jobs_do_not_stay(home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    (home / "old").touch()
    os.utime(home / "old", (0, 0))
    made, _ = offer(os.environ, "/no/munge")
    assert [one.name for one in home.iterdir()] == [made.session]


def test_a_job_leaves_no_file(home: Path, server: TCPStore) -> None:
    with joined(Job(0, 1, 0, "127.0.0.1", server.port, True, "run/7", "host"), "code") as mine:
        assert mine._session in os.listdir(home)
        assert len(mine.membership.members) == 1
        assert os.listdir(home) == []  # all have joined


def test_the_way_by_the_environment(home: Path) -> None:
    made, drawn = offer({VARIABLE: TEXT}, None)
    assert (made.ways, drawn, take(made, {VARIABLE: TEXT}, None)) == (("environment",), TEXT.encode(), drawn)
    assert not home.exists()
    with pytest.raises(SecretError, match=f"^{VARIABLE} is set for rank 0 and not here"):
        take(made, os.environ, None)
    with pytest.raises(SecretError, match=f"^{VARIABLE} is set here and not for rank 0"):
        take(Offer(("file",), made.session), {VARIABLE: TEXT}, None)
    with pytest.raises(SecretError, match=f"^{VARIABLE} has 5 characters: must have 16 or more"):
        offer({VARIABLE: "short"}, None)


def test_two_texts_are_a_sentence(home: Path, server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job(n, 2, n, "127.0.0.1", server.port, True, "run/8", "host") for n in range(2)]
    monkeypatch.setenv(VARIABLE, TEXT)
    with joined(jobs[0], "code"):
        monkeypatch.setenv(VARIABLE, TEXT + "!")
        words = r"^the value of proof in the job's store at \S+ does not have the job's secret"
        with pytest.raises(JobError, match=words), joined(jobs[1], "code"):
            pass


def test_no_way_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parents[1].write_text("a file where the folder would be")
    (home.parents[2] / "tmp").write_text("here too")
    with pytest.raises(SecretError, match=rf"^no secret of the job can be had: nothing .* set {VARIABLE} to one text"):
        offer(os.environ, "/no/munge")


@pytest.mark.parametrize(
    "value",
    [None, 3, [], {}, {"ways": ["file"], "session": "../../etc/passwd", "credential": None},
     {"ways": 3, "session": "ab" * 16, "credential": None}, {"ways": [], "session": "ab" * 16, "credential": 3}],
)  # fmt: skip
def test_an_offer_is_checked(value: object) -> None:
    with pytest.raises(SecretError, match=r"^the offer of the job's secret is none of zerobench's"):
        Offer.from_plain(value)


@pytest.fixture
def munged() -> Iterator[str]:
    """The socket of a munged of our own."""
    program = shutil.which("munged", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None or os.geteuid() != 0:
        pytest.skip(
            "munged is not installed (apt-get install munge), or this is not root, who may make others' credentials"
        )
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)  # another user's munge comes by
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    with subprocess.Popen([program, "--foreground", "--force", *options], stderr=subprocess.DEVNULL) as daemon:
        while not (folder / "socket").exists():
            assert daemon.poll() is None
        yield str(folder / "socket")
        daemon.terminate()
    shutil.rmtree(folder)


def test_the_way_by_munge(home: Path, munged: str) -> None:
    """Any number of ranks of a machine open the credential; of another user's nothing is taken."""
    made, drawn = offer(os.environ, munged)
    assert made.ways == ("munge", "file")
    secret.forget(made.session, os.environ)
    assert [take(made, os.environ, munged) for _ in range(3)] == [drawn] * 3
    assert made.credential is not None
    payload = munge.payload_of(made.credential, munged)
    forged = subprocess.run(
        ["munge", f"--socket={munged}", "--uid=65534"], input=payload, capture_output=True, text=True, check=True
    ).stdout.strip()
    broken = made.credential[:40] + ("A" if made.credential[40] != "A" else "B") + made.credential[41:]
    for credential in (forged, broken, "MUNGE:x; rm -rf:", None):
        with pytest.raises(SecretError, match="nor by munge"):
            take(replace(made, credential=credential), os.environ, munged)
    with pytest.raises(SecretError, match="nor by munge"):  # an old one's payload is of another session
        take(replace(made, session="cd" * 16), os.environ, munged)


def test_slurm_tells_munges_socket() -> None:
    told = "AuthAltTypes = (null)\nAuthInfo                = socket=/tmp/x/munge.socket,ttl=60\nAuthType = auth/munge\n"
    assert munge.socket_of_slurm(lambda *_: told) == "/tmp/x/munge.socket"
    assert munge.socket_of_slurm(lambda *_: "AuthInfo = (null)\n") is None
