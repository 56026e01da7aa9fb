"""Faults of checkpoints and of weights on the disk."""

from __future__ import annotations

from ..mutant import Mutant

CHECKPOINT = "tests/distributed/test_checkpoint.py"
CHECKPOINT_PLAN = "tests/unit/test_checkpoint_plan.py"
FAULTS_CHECKPOINT = "tests/faults/test_checkpoint.py"
WEIGHTS = "tests/unit/test_weights.py"

MUTANTS = (
    Mutant(
        "checkpoint-offset-in-chunk-lost",
        "A rank that needs the second part of a saved chunk reads the first.",
        "file.seek(place.offset + item.storage_offsets[0] * dtype.itemsize)",
        "file.seek(place.offset)",
        (f"{CHECKPOINT}::test_any_stage_and_n_loads_what_any_other_saved",),
    ),
    Mutant(
        "checkpoint-offset-off-by-one",
        "A chunk of weights is read from one element further on.",
        "file.seek(chunk.begin + (first - chunk.start) * self.dtype.itemsize)",
        "file.seek(chunk.begin + (first - chunk.start + 1) * self.dtype.itemsize)",
        (f"{WEIGHTS}::test_names_and_shapes_as_torch_has_them",),
    ),
    Mutant(
        "checkpoint-gap-not-seen",
        "A checkpoint that lacks elements of a tensor is loaded, the rest being whatever was there.",
        "if sum(item.lengths[0] for item in found) != sum(chunk.numel() for chunk in flat.chunks.values()):",
        "if sum(item.lengths[0] for item in found) > sum(chunk.numel() for chunk in flat.chunks.values()):",
        (f"{CHECKPOINT_PLAN}::test_elements_that_were_not_saved_are_missed",),
    ),
    Mutant(
        "checkpoint-index-first",
        "The index of a save that replaces another is put in place before the files that it names.",
        "        for name in new:\n            os.rename(self._partial / name, self.path / name)\n",
        "        shutil.copy(self._partial / INDEX, self.path / INDEX)\n"
        "        for name in new:\n"
        "            os.rename(self._partial / name, self.path / name)\n",
        (f"{FAULTS_CHECKPOINT}::test_a_killed_save_leaves_the_last_good_one",),
    ),
    Mutant(
        "checkpoint-old-files-go-first",
        "A save that replaces another removes the old one's files before the new index is there.",
        "        new = [path.name for path in self._partial.iterdir() if path.name != INDEX]\n",
        "        new = [path.name for path in self._partial.iterdir() if path.name != INDEX]\n"
        '        for old in self.path.glob("rank*-*.safetensors"):\n'
        "            old.unlink()\n",
        (f"{FAULTS_CHECKPOINT}::test_a_killed_save_leaves_the_last_good_one",),
    ),
    Mutant(
        "checkpoint-written-in-place",
        "A first save has its name from the start, so that a killed one looks like a checkpoint.",
        'self._partial = self.path.parent / f"{self.path.name}.partial-{number}"',
        "self._partial = self.path",
        (f"{FAULTS_CHECKPOINT}::test_a_killed_save_leaves_the_last_good_one",),
    ),
    Mutant(
        "checkpoint-file-digest-not-checked",
        "A damaged file of a checkpoint is loaded.",
        "if _digest_of_file(folder / file.name) != file.sha256:",
        "if not _digest_of_file(folder / file.name):",
        (f"{FAULTS_CHECKPOINT}::test_a_damaged_checkpoint_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "checkpoint-index-digest-not-checked",
        "A damaged index is believed.",
        "if digest != _digest(contents):",
        "if not _digest(contents):",
        (f"{FAULTS_CHECKPOINT}::test_a_damaged_checkpoint_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "checkpoint-overlap-allowed",
        "A forged index may point a tensor at another tensor's bytes, and leave its own to none.",
        "_require(begin == end, f",
        "_require(begin >= 0, f",
        (f"{FAULTS_CHECKPOINT}::test_a_forged_index_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "checkpoint-link-followed",
        "A link in a checkpoint makes it read files from elsewhere.",
        "if (folder / name).resolve().parent != folder.resolve():",
        "if not (folder / name).resolve():",
        (f"{FAULTS_CHECKPOINT}::test_a_forged_index_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "weights-pickle-opened",
        "A pickled file of weights is taken for one that can be read.",
        "if path.suffix in PICKLED:",
        "if path.suffix in ():",
        (f"{WEIGHTS}::test_paths_that_are_none",),
    ),
    Mutant(
        "weights-bytes-do-not-fit",
        "An entry of a safetensors header may have other bytes than its shape needs.",
        "if not right or end - begin != prod(shape) * dtype.itemsize or head + end > size:",
        "if not right or head + end > size:",
        (f"{WEIGHTS}::test_damaged_files",),
    ),
)
