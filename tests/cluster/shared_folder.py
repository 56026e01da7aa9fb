"""A file server's folder, mounted by clients as NFS mounts it: without locks, with caches, and answers that get lost.

client   a mount of its own (FUSE, the kernel's protocol spoken in Python) with the kernel's caches of its own: a name
         that was looked up stays as it was, there or not, for `remember_s`, whatever another client does
node     an inode that a client knows, by a handle (O_PATH) that follows its renames, as NFS's do
clock    `skew_s` ahead of this machine's, for all times of files
lost     while the file LOSE lies beside the folder, the next rename is done and asked for again: its source is gone

flock and fcntl's locks end with ENOLCK, as on NFS without a lock daemon. As root, on Linux, with /dev/fuse.
"""

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOSE = "lose-a-rename"

UNKNOWN = {21, 22, 23, 24, 43, 46, 47}
"""Operations that this file system has not: extended attributes, fallocate, lseek, copies on the server."""

WITHOUT_REPLY = {2, 36, 42}
BIG_WRITES, POSIX_LOCKS, FLOCK_LOCKS, TRUNCATES = 1 << 5, 1 << 1, 1 << 10, 1 << 3
CACHE_DIR, KEEP_CACHE = 1 << 3, 1 << 1


def missing() -> str:
    """Returns why no such folder can be mounted here; empty where it can."""
    if os.geteuid() or not Path("/dev/fuse").exists():
        return "it takes root and /dev/fuse"
    try:
        with open("/dev/fuse", "rb"):
            return ""
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"


@contextmanager
def clients(folder: Path, *mounts: Path, remember_s: float = 0.0, skew_s: float = 0.0) -> Iterator[None]:
    """Mounts `folder` for each client. Raises RuntimeError where that is not possible."""
    with ExitStack() as held:
        for mount in mounts:
            mount.mkdir()
            command = [sys.executable, __file__, str(folder), str(mount), str(remember_s), str(skew_s)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            held.callback(_end, server, mount)
            if server.stdout.readline() != "mounted\n":
                raise RuntimeError("the folder cannot be mounted")
        yield


def _end(server: subprocess.Popen[str], mount: Path) -> None:
    subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()


class Server:
    """One client's view of the folder. `nodes`: id -> [handle, inode, lookups that the kernel has not forgotten]."""

    def __init__(self, folder: Path, remember_s: float, skew_s: float) -> None:
        self.folder, self.remember_s, self.skew_s = folder, remember_s, skew_s
        handle = os.open(folder, os.O_PATH)
        self.nodes = {1: [handle, os.fstat(handle).st_ino, 1]}
        self.ids = {os.fstat(handle).st_ino: 1}
        self.next = 2
        self.directories: dict[int, list[tuple[int, int, bytes]]] = {}

    def path(self, node: int) -> str:
        handle = self.nodes[node][0]
        if os.fstat(handle).st_nlink == 0:
            raise OSError(errno.ESTALE, "removed")
        return f"/proc/self/fd/{handle}"

    def attributes(self, node: int) -> bytes:
        handle = self.nodes[node][0]
        found = os.fstat(handle)
        times = [ns + int(self.skew_s * 1e9) for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        seconds, rest = [t // 10**9 for t in times], [t % 10**9 for t in times]
        return struct.pack("<6Q10I", found.st_ino, found.st_size, found.st_blocks, *seconds, *rest, found.st_mode,
                           found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)  # fmt: skip

    def valid(self) -> tuple[int, int]:
        return int(self.remember_s), int(self.remember_s % 1 * 1e9)

    def entry(self, parent: int, name: bytes) -> bytes:
        """Looks a name up. That it is not there is remembered too."""
        seconds, rest = self.valid()
        try:
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes[parent][0])
        except FileNotFoundError:
            if not self.remember_s:
                raise
            return struct.pack("<4Q2I", 0, 0, seconds, seconds, rest, rest) + bytes(88)
        inode = os.fstat(handle).st_ino
        node = self.ids.get(inode)
        if node is None:
            node, self.next = self.next, self.next + 1
            self.nodes[node], self.ids[inode] = [handle, inode, 0], node
        else:
            os.close(handle)
        self.nodes[node][2] += 1
        return struct.pack("<4Q2I", node, 0, seconds, seconds, rest, rest) + self.attributes(node)

    def forget(self, node: int, count: int) -> None:
        if node in self.nodes and node != 1:
            self.nodes[node][2] -= count
            if self.nodes[node][2] <= 0:
                handle, inode, _ = self.nodes.pop(node)
                self.ids.pop(inode, None)
                os.close(handle)

    # -- operations: node and what comes with it -> the reply

    def init(self, _: int, body: bytes) -> bytes:
        flags = BIG_WRITES | POSIX_LOCKS | FLOCK_LOCKS | TRUNCATES
        return struct.pack("<4I2H2I2H8I", 7, 31, 2**17, flags, 12, 9, 2**17, 1, 32, 0, *[0] * 8)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(node, names(body)[0])

    def getattr(self, node: int, _: bytes) -> bytes:
        self.path(node)
        return struct.pack("<Q2I", *self.valid(), 0) + self.attributes(node)

    def setattr(self, node: int, body: bytes) -> bytes:
        given = struct.unpack("<2I6Q8I", body[:88])
        what, size, atime, mtime = (given[place] for place in (0, 3, 5, 6))
        atime_ns, mtime_ns, mode, uid, gid = (given[place] for place in (8, 9, 11, 13, 14))
        path = self.path(node)
        if what & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if what & 6:
            os.chown(path, uid if what & 2 else -1, gid if what & 4 else -1)
        if what & 8:
            os.truncate(path, size)
        if what & (16 | 32 | 128 | 256):
            now, old = time.time_ns(), os.stat(path)
            skew = int(self.skew_s * 1e9)
            first = now if what & 128 else atime * 10**9 + atime_ns - skew if what & 16 else old.st_atime_ns
            second = now if what & 256 else mtime * 10**9 + mtime_ns - skew if what & 32 else old.st_mtime_ns
            os.utime(path, ns=(first, second))
        return self.getattr(node, b"")

    def mkdir(self, node: int, body: bytes) -> bytes:
        (mode,), name = struct.unpack("<I", body[:4]), names(body[8:])[0]
        os.mkdir(name, mode, dir_fd=self.nodes[node][0])
        return self.entry(node, name)

    def unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(names(body)[0], dir_fd=self.nodes[node][0])
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(names(body)[0], dir_fd=self.nodes[node][0])
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        return self.move(node, struct.unpack("<Q", body[:8])[0], names(body[8:]))

    def rename2(self, node: int, body: bytes) -> bytes:
        target, flags = struct.unpack("<QI", body[:12])
        if flags:
            raise OSError(errno.EINVAL, "flags of rename")
        return self.move(node, target, names(body[16:]))

    def move(self, source: int, target: int, what: list[bytes]) -> bytes:
        handles = {"src_dir_fd": self.nodes[source][0], "dst_dir_fd": self.nodes[target][0]}
        os.rename(what[0], what[1], **handles)
        if os.fsencode(LOSE) in os.listdir(os.fsencode(self.folder.parent)):
            (self.folder.parent / LOSE).unlink()
            os.rename(what[0], what[1], **handles)
        return b""

    def open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack("<I", body[:4])
        return struct.pack("<Q2I", os.open(self.path(node), flags & ~(os.O_NOFOLLOW | os.O_CREAT)), 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        (flags, mode), name = struct.unpack("<2I", body[:8]), names(body[16:])[0]
        file = os.open(name, flags | os.O_CREAT, mode, dir_fd=self.nodes[node][0])
        return self.entry(node, name) + struct.pack("<Q2I", file, 0, 0)

    def read(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack("<2QI", body[:20])
        return os.pread(file, size, offset)

    def write(self, _: int, body: bytes) -> bytes:
        file, offset, size = struct.unpack("<2QI", body[:20])
        return struct.pack("<2I", os.pwrite(file, body[40 : 40 + size], offset), 0)

    def release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack("<Q", body[:8])[0])
        return b""

    def fsync(self, _: int, body: bytes) -> bytes:
        os.fsync(struct.unpack("<Q", body[:8])[0])
        return b""

    def statfs(self, _: int, body: bytes) -> bytes:
        s = os.statvfs(self.folder)
        return struct.pack("<5Q10I", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, 255,
                           s.f_frsize, *[0] * 7)  # fmt: skip

    def opendir(self, node: int, _: bytes) -> bytes:
        found = [(0, 4, b"."), (0, 4, b"..")]
        for name in os.listdir(os.fsencode(self.path(node))):
            try:
                one = os.stat(name, dir_fd=self.nodes[node][0], follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append((one.st_ino, stat.S_IFMT(one.st_mode) >> 12, name))
        self.next += 1
        self.directories[self.next] = found
        return struct.pack("<Q2I", self.next, (CACHE_DIR | KEEP_CACHE) * bool(self.remember_s), 0)

    def readdir(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack("<2QI", body[:20])
        reply = b""
        for place, (inode, kind, name) in enumerate(self.directories[handle][offset:], offset + 1):
            one = struct.pack("<2Q2I", inode or 1, place, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(reply) + len(one) > size:
                break
            reply += one
        return reply

    def releasedir(self, _: int, body: bytes) -> bytes:
        del self.directories[struct.unpack("<Q", body[:8])[0]]
        return b""

    def done(self, _: int, body: bytes) -> bytes:
        return b""

    def refuse_lock(self, _: int, body: bytes) -> bytes:
        raise OSError(errno.ENOLCK, "no lock daemon")

    def serve(self, device: int) -> None:
        """Answers the kernel until the folder is unmounted."""
        operations: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir,
            10: self.unlink, 11: self.rmdir, 12: self.rename, 14: self.open, 15: self.read,
            16: self.write, 17: self.statfs, 18: self.release, 20: self.fsync, 25: self.done, 26: self.init,
            27: self.opendir, 28: self.readdir, 29: self.releasedir, 30: self.done, 31: self.refuse_lock,
            32: self.refuse_lock, 33: self.refuse_lock, 35: self.create, 38: self.done, 45: self.rename2,
        }  # fmt: skip
        while True:
            try:
                request = os.read(device, 2**20 + 4096)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.ENOENT:  # a request that was taken back
                    continue
                return
            _, operation, unique, node = struct.unpack("<2I2Q", request[:24])
            body = request[40:]
            if operation in WITHOUT_REPLY:
                if operation == 2:
                    self.forget(node, *struct.unpack("<Q", body[:8]))
                elif operation == 42:
                    for forgotten in struct.iter_unpack("<2Q", body[8:]):
                        self.forget(*forgotten)
                continue
            try:
                answer = operations[operation](node, body) if operation not in UNKNOWN else None
                code = 0 if answer is not None else errno.ENOSYS
            except KeyError:
                answer, code = None, errno.ENOSYS
            except OSError as error:
                answer, code = None, error.errno or errno.EIO
            answer = answer or b""
            try:
                os.write(device, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)
            except FileNotFoundError:  # interrupted meanwhile
                continue


def names(body: bytes) -> list[bytes]:
    """Splits names that end with a zero byte."""
    return body.split(b"\0")


def main() -> None:
    folder, mount, remember_s, skew_s = sys.argv[1:]
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(1, 15)  # ends with the test that started it
    os.umask(0)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions".encode()
    if library.mount(b"shared", os.fsencode(mount), b"fuse.shared", 6, options):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    Server(Path(folder).absolute(), float(remember_s), float(skew_s)).serve(device)


if __name__ == "__main__":
    main()
