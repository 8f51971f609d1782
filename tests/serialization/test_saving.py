"""Files: what is in one, what a crash leaves of one, and what a bad one gets."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from marlvec.errors import CheckpointError, MarlvecError, SerialisationError
from marlvec.serialization.archive import NamedArray, UniqueNames, read_archive, write_archive
from marlvec.serialization.values import read_value, write_value
from tests.bombs import MB, deflated, peak_of, sealed
from tests.connectors.samples import same_tree
from tests.programs import DYING

DATA = {
    "numbers": [1, 2.5, None, True, "text"],
    "arrays": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.array("word"), np.zeros((0, 4), np.int8)]},
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
}
ROOT = Path(__file__).resolve().parents[2]
END = len("marlvec archive, format 0002, sha256 ")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chain.npz"
    write_archive(path, DATA)
    return path


def test_data_comes_back_to_the_bit(file: Path) -> None:
    same_tree(read_archive(file), DATA)
    assert read_archive(str(file)).keys() == DATA.keys()
    assert list(file.parent.iterdir()) == [file]


def test_equal_data_gives_equal_files(file: Path) -> None:
    before = file.read_bytes()
    write_archive(file, copy.deepcopy(DATA))
    assert file.read_bytes() == before


def test_numpy_opens_it_without_pickle(file: Path) -> None:
    with np.load(file, allow_pickle=False) as entries:
        assert entries.files == ["manifest", "array_0", "array_1", "array_2", "array_3"]
        assert b'"format": 2' in entries["manifest"].tobytes()
        np.testing.assert_array_equal(entries["array_0"], DATA["arrays"]["a"])  # type: ignore[call-overload]  # a dict


def test_an_array_is_called_as_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    data = {"a": np.arange(2), "b": [NamedArray("obs/camera", np.arange(3)), NamedArray("manifest", np.arange(4))]}
    write_archive(path, data)
    with np.load(path, allow_pickle=False) as entries:
        assert entries.files == ["manifest", "array_0", "obs/camera", "manifest~2"]
    same_tree(read_archive(path), {"a": np.arange(2), "b": [np.arange(3), np.arange(4)]})


def test_names_in_files_are_free_and_plain() -> None:
    """No slash at either end, nothing unprintable, none twice."""
    names = UniqueNames(["taken"])
    wanted = ["obs/image", "/obs/", "//", "", "a\nb", "a\tb", "taken", "obs/image"]
    assert [names(name) for name in wanted] == [
        "obs/image",
        "obs",
        "_",
        "_~2",
        "a_b",
        "a_b~2",
        "taken~2",
        "obs/image~2",
    ]


def test_a_link_is_followed_and_stays_one(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.npz"
    link.symlink_to(file)
    write_archive(link, {"x": 1})
    assert link.is_symlink()
    assert read_archive(file) == read_archive(link) == {"x": 1}


def test_a_file_is_as_readable_for_others_as_any_other_new_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


# --- crashes

SAVE = f"""{DYING}
import numpy as np
from marlvec.serialization import archive

def child(at):
    spoil(at)
    archive.write_archive(path, {{"new": [np.arange(3000), np.arange(5)]}})
    os._exit(7)

for at in range(1, 200):
    archive.write_archive(path, {{"old": np.arange(100)}})
    pid = os.fork()
    if pid == 0:
        child(at)
    status = os.waitpid(pid, 0)[1]
    print(next(iter(archive.read_archive(path))), os.waitstatus_to_exitcode(status))
    if os.waitstatus_to_exitcode(status) == 7:
        break
"""


@pytest.mark.slow("starts programs of its own")
@pytest.mark.fault("H8")
def test_a_process_killed_while_it_writes_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Killed before each write, flush, fsync and the rename, one after the other; what is there is read each time."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE, str(tmp_path / "chain.npz")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    outcomes = [line.split() for line in result.stdout.splitlines()]
    assert len(outcomes) > 10
    found = [name for name, _ in outcomes]
    renamed = found.index("new")
    assert found == ["old"] * renamed + ["new"] * (len(found) - renamed)
    assert [code for _, code in outcomes] == ["-9"] * (len(outcomes) - 1) + ["7"]
    assert len(outcomes) - renamed >= 2  # killed once more after the rename, before the folder was on the disk


@pytest.mark.fault("H8")
@pytest.mark.parametrize("where", ["fsync", "replace", "data"])
def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(
    where: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    data: dict[str, Any] = {"new": 1}
    if where == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif where == "replace":
        monkeypatch.setattr(Path, "replace", full)
    else:
        data = {"new": float("nan")}  # no JSON: `encode` would have turned it into some
    with pytest.raises(OSError if where != "data" else ValueError, match=r"No space left|not JSON compliant"):
        write_archive(file, data)
    monkeypatch.undo()
    same_tree(read_archive(file), DATA)
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_archive(tmp_path / "nowhere" / "chain.npz", {})


# --- damage


def refused(path: Path, content: bytes, text: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=text) as raised:
        read_archive(path)
    assert raised.value.file == str(path)
    assert str(raised.value) == f"{path} {raised.value.reason}"


@pytest.mark.fault("H9")
def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        refused(tmp_path / "cut.npz", content[:length], "is not a marlvec archive, or its end is missing")
    refused(tmp_path / "cut.npz", content[100:], "is damaged")
    refused(tmp_path / "cut.npz", content + b"0", "its end is missing")


@pytest.mark.slow("starts programs of its own")
@pytest.mark.fault("H9")
def test_a_file_with_one_bit_turned_is_refused(file: Path, tmp_path: Path) -> None:
    """Every byte once, a bit of each in turn; of the end, which holds the digest, every bit."""
    content = file.read_bytes()
    start = len(content) - END - 64
    bits = [(at, at % 8) for at in range(start)] + [(at, bit) for at in range(start, len(content)) for bit in range(8)]
    for at, bit in bits:
        turned = bytearray(content)
        turned[at] ^= 1 << bit
        refused(tmp_path / "turned.npz", bytes(turned), "is damaged|its end is missing|is of format")


def packed(entries: dict[str, bytes], *, digest: bool = True, **settings: Any) -> bytes:
    """A zip with a true digest at its end, as somebody could make who means harm."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **settings) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return sealed(file.getvalue(), digest=digest)


def entries_of(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy_of(array: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    npy.write_array(file, np.asarray(array), **settings)
    return file.getvalue()


def manifest(text: str) -> bytes:
    return npy_of(np.frombuffer(text.encode(), np.uint8))


def changed(**new: bytes | None) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """Entries with some put in or, where None, taken out."""

    def change(entries: dict[str, bytes]) -> dict[str, bytes]:
        entries = {**entries, **{f"{name}.npy": content for name, content in new.items() if content is not None}}
        return {name: content for name, content in entries.items() if new.get(name[:-4], b"") is not None}

    return change


@pytest.mark.fault("H9")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (changed(array_1=None), "has contents that cannot be read: KeyError"),
        (changed(manifest=None), "has contents that cannot be read: KeyError"),
        (changed(array_9=npy_of(1)), r"holds entries that its manifest does not use: \['array_9'\]"),
        (changed(other=b"hello"), "has contents that cannot be read: ValueError"),
        (changed(array_0=b""), "has contents that cannot be read"),
        (changed(manifest=manifest("{")), "has contents that cannot be read: JSONDecodeError"),
        (changed(manifest=manifest("[]")), "has contents that cannot be read: TypeError"),
        (changed(manifest=manifest("{}")), "has contents that cannot be read: KeyError"),
        (changed(manifest=manifest('{"data": NaN}')), "NaN is not JSON"),
        (changed(manifest=manifest('{"data": {"$array": []}}')), "has contents that cannot be read: TypeError"),
        (changed(manifest=manifest('{"data": ' + "[" * 10**5 + "]" * 10**5 + "}")), "RecursionError"),
        (changed(manifest=npy_of(np.ones(3))), "has contents that cannot be read"),
        (lambda entries: {"manifest.npy": manifest('{"data": 3}')}, "holds int, not a dict"),
        (lambda entries: {}, "has contents that cannot be read: KeyError"),
    ],
)
def test_a_file_packed_anew_with_other_entries_is_refused(change: Any, text: str, file: Path, tmp_path: Path) -> None:
    entries = entries_of(file)
    sound = tmp_path / "sound.npz"
    sound.write_bytes(packed(entries))
    same_tree(read_archive(sound), DATA)
    refused(tmp_path / "bad.npz", packed(entries, digest=False), "is damaged")
    refused(tmp_path / "bad.npz", packed(change(entries)), text)


@pytest.mark.fault("H9")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, text in (
        ("missing", "cannot be read: No such file"),
        ("", "is not a file"),
        ("pipe", "is not a file"),  # and nobody waits for what may come out of it
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ):
        with pytest.raises(CheckpointError, match=text):
            read_archive(tmp_path / name)
    (tmp_path / "closed.npz").touch()
    monkeypatch.setattr(Path, "open", lambda *a: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        read_archive(tmp_path / "closed.npz")


@pytest.mark.fault("H10")
def test_a_file_of_another_format_is_refused_and_says_so(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for number in (0, 1, 9999):
        newer = content.replace(b"format 0002", f"format {number:04}".encode())
        refused(
            tmp_path / "newer.npz", newer, f"is of format {number}; marlvec .* reads format 2: use the version that"
        )


# --- malice


class Bomb:
    """Unpickled, it leaves its mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.fault("H11")
def test_nothing_in_a_file_is_executed(file: Path, tmp_path: Path) -> None:
    """Pickles as an object array, as an entry and as the whole file, each under a true digest where one can be."""
    mark = tmp_path / "executed"
    bomb = np.array([Bomb(mark)], object)
    bad = tmp_path / "bad.npz"
    objects = npy_of(bomb, allow_pickle=True)
    refused(bad, packed(changed(array_0=objects)(entries_of(file))), "array_0.npy holds Python objects")
    nested = npy_of(np.zeros(1, [("a", "O")]), allow_pickle=True)
    refused(bad, packed(changed(array_0=nested)(entries_of(file))), "array_0.npy holds Python objects")
    refused(bad, packed(changed(manifest=objects)(entries_of(file))), "manifest.npy holds Python objects")
    refused(
        bad, packed(changed(array_0=pickle.dumps(Bomb(mark)))(entries_of(file))), "has contents that cannot be read"
    )
    refused(bad, pickle.dumps(Bomb(mark)), "is not a marlvec archive")
    end = b"marlvec archive, format 0002, sha256 "
    whole = pickle.dumps(Bomb(mark)) + end
    refused(bad, whole + hashlib.sha256(whole).hexdigest().encode(), "has contents that cannot be read: BadZipFile")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # it would have gone off


@pytest.mark.fault("H11")
def test_a_file_that_unpacks_to_more_than_it_is_is_refused(file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.npz"
    bomb = changed(array_0=npy_of(np.zeros(10**6)))(entries_of(file))
    refused(bad, packed(bomb, compression=zipfile.ZIP_DEFLATED), "holds 'manifest.npy' compressed or encrypted")
    header = npy_of(np.zeros(0)).replace(b"(0,)", b"(99**9,)").replace(b"      ", b"  ", 1)
    refused(bad, packed(changed(array_0=header)(entries_of(file))), "has contents that cannot be read")


@pytest.mark.fault("H11")
@pytest.mark.parametrize("shape", [(10**15,), (2**62, 4), (-1, -6), (7,), (5,), (2, 3.0), (True, 6), "x"])
def test_a_header_that_lies_about_its_array_is_refused(shape: Any, file: Path, tmp_path: Path) -> None:
    """No memory is asked for on its word."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    lying = header.getvalue() + bytes(24)
    refused(tmp_path / "bad.npz", packed(changed(array_0=lying)(entries_of(file))), "has contents that cannot be read")


@pytest.mark.fault("H11")
@pytest.mark.parametrize("descr", ["|S0", "<U0", "|V0", [("a", "|V0")], [("a", "<f4", (0,))]])
def test_items_of_no_bytes_are_refused(descr: Any, file: Path, tmp_path: Path) -> None:
    """A header alone would make any number of them, and one loop over them would never end."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": (2**60,)})
    refused(tmp_path / "bad.npz", packed(changed(array_0=header.getvalue())(entries_of(file))), "items of no bytes")
    with pytest.raises(SerialisationError, match="whose items have no bytes, cannot be saved"):
        write_archive(tmp_path / "none.npz", {"one": np.empty(3, "V0")})
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.fault("H11")
def test_entries_that_overlap_are_refused(file: Path, tmp_path: Path) -> None:
    """The same bytes listed many times over, and one name twice."""
    entries = entries_of(file)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        first = archive.infolist()[0]
        for i in range(200):
            again = copy.copy(first)
            again.filename = f"again_{i}.npy"
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]  # as after a write
    refused(tmp_path / "bad.npz", sealed(buffer.getvalue()), "overlap")


@pytest.mark.fault("H11")
def test_names_that_point_elsewhere_write_nothing(file: Path, tmp_path: Path) -> None:
    """Zip slip: entries are read, never unpacked."""
    folder = tmp_path / "inner"
    folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    entries = {**entries_of(file), "../../slip.npy": npy_of(1)}
    refused(folder / "bad.npz", packed(entries), "holds entries that its manifest does not use")
    entries = {**entries_of(file), str(tmp_path / "slip.npy"): npy_of(2)}
    refused(folder / "bad.npz", packed(entries), r"slip\.npy'; expected arrays, NAME\.npy, of relative names")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, folder / "bad.npz"])


def test_the_error_survives_a_trip_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError(Path("a/b.npz"), "is damaged")))
    assert (str(error), error.file, error.reason) == ("a/b.npz is damaged", "a/b.npz", "is damaged")
    assert isinstance(error, MarlvecError)


# --- more than there is: each of these is a file of at most a megabyte that says, or would make, a gigabyte or more


def with_sizes(content: bytes, name: str, size: int) -> bytes:
    """Have the directory at the end of a zip say that an entry, stored as it is, has so many bytes; the digest too."""
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))
    entry = bytearray(content[at : at + 46])
    entry[10:12] = bytes(2)  # stored
    entry[20:28] = size.to_bytes(4, "little") * 2
    content = (content[:at] + bytes(entry) + content[at + 46 :])[:-64]
    return content + hashlib.sha256(content).hexdigest().encode()


def bombs(file: Path) -> dict[str, bytes]:
    own = entries_of(file)
    text = b'{"data": {"a": ' + b"[" * 300_000 + b"]" * 300_000 + b"}}"
    again = '{"data": {"a": [' + ",".join(['{"$array": "array_0"}'] * 20_000) + "]}}"
    long_header = b"\x93NUMPY\x02\x00" + (400_000).to_bytes(4, "little") + b" " * 400_000
    array_0 = own.pop("array_0.npy")
    inflated = sealed(deflated(own, "array_0"))
    own["array_0.npy"] = array_0
    return {
        "deflated": inflated,
        "a directory that says little": with_sizes(inflated, "array_0.npy", 128),
        "a directory that says much": with_sizes(packed(own), "array_0.npy", 2**31),
        "one array many times": packed(
            {**own, "array_0.npy": npy_of(np.zeros(400_000, np.int8)), "manifest.npy": manifest(again)}
        ),
        "a long header": packed({**own, "array_0.npy": long_header}),
        "a header deep in brackets": packed(
            {**own, "array_0.npy": b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000 + bytes(9)}
        ),
        "a dtype that is Python": packed(
            {
                **own,
                "array_0.npy": npy_of(np.zeros(1, "<f8")).replace(b"'<f8'", b"'f4,,'", 1).replace(b"  \n", b" \n", 1),
            }
        ),
        "a text deep in brackets": packed({**own, "manifest.npy": manifest(text.decode())}),
    }


@pytest.mark.slow("starts programs of its own")
@pytest.mark.fault("H11")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_small_file_never_takes_much_memory(file: Path, tmp_path: Path) -> None:
    """What a file says of itself is checked before it is believed: nothing is inflated, or asked for on its word."""
    from marlvec.collect import MultiAgentBatch, SampleBatch
    from marlvec.connectors import AgentPipeline
    from marlvec.policies import load_policy

    bad = tmp_path / "bad.npz"
    for name, content in bombs(file).items():
        bad.write_bytes(content)
        for read in (read_archive, load_policy, AgentPipeline.load, SampleBatch.load, MultiAgentBatch.load):
            assert peak_of(lambda read=read: refuse(read, bad)) < 50 * MB, name  # type: ignore[misc]  # bound at once


def refuse(read: Callable[[Path], object], path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(path)
    assert raised.value.file == str(path)
    assert len(str(raised.value)) < 2000


@pytest.mark.fault("H11")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(file: Path, tmp_path: Path) -> None:
    file_of_two = io.BytesIO()
    with zipfile.ZipFile(file_of_two, "w") as archive:
        for name, content in [*entries_of(file).items(), ("array_0.npy", npy_of(np.ones(3)))]:
            archive.writestr(name, content)
    refused(tmp_path / "bad.npz", sealed(file_of_two.getvalue()), "two of one name")


# Files of one value.


def test_what_was_written_is_read(tmp_path: Path) -> None:
    value = {"rows": np.arange(3), "names": ("a", None), 4: 0.5}
    write_value(tmp_path / "a.npz", "thing", value, "the thing")
    found = read_value(tmp_path / "a.npz", "thing", "thing")
    np.testing.assert_array_equal(found.pop("rows"), value.pop("rows"))
    assert found == value


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write_value(tmp_path / "a.npz", "thing", 1, "the thing")
    with pytest.raises(CheckpointError, match=r"a\.npz holds no other thing, but \['thing'\]"):
        read_value(tmp_path / "a.npz", "other", "other thing")


@pytest.mark.parametrize(
    "form", [{"$function": "there is no such function"}, {"$space": "Odd", "args": []}, {"$odd": 1}]
)
def test_what_cannot_be_made_of_it_is_a_checkpoint_error(form: object, tmp_path: Path) -> None:
    """Whatever `decode` raises: of collectors on Ray a function that is not registered came out raw."""
    write_archive(tmp_path / "a.npz", {"thing": form})
    with pytest.raises(CheckpointError, match="holds no thing: "):
        read_value(tmp_path / "a.npz", "thing", "thing")
