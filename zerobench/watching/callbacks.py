"""Callbacks that mark steps in a trainer's loop: transformers' Trainer and Lightning's."""

from __future__ import annotations

from typing import Any

from .watch import Watch


class WatchOfTrainer:
    """The common part of both callbacks: the watch, which the first step creates, and its end."""

    watch: Watch | None = None

    def on_train_end(self, *_args: Any, **_objects: Any) -> None:
        """Makes the tables."""
        if self.watch is not None:
            self.watch.stop()

    @property
    def results(self) -> Any:
        """The tables, on rank 0 once the training has ended."""
        return self.watch.results if self.watch is not None else None


def trainer_callback(**options: Any) -> Any:
    """Returns a transformers.TrainerCallback that watches a Trainer's steps; `options` are Watch's.

    A step lasts from one `on_step_begin` to the next `on_step_end`, with all of its micro-batches. The callback's
    `results` exist when training has ended. A trainer does not notify callbacks of a failure:
    `callback.watch.stop(error)` then makes the tables. Raises ImportError if transformers is not installed.
    """
    from transformers import TrainerCallback

    class TrainerWatch(WatchOfTrainer, TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if self.watch is None:
                self.watch = Watch(objects["model"], objects.get("optimizer"), ends="step", **options).start()

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if self.watch is not None:
                self.watch.step()

    return TrainerWatch()


def lightning_callback(**options: Any) -> Any:
    """Returns a lightning.pytorch.Callback that watches a Trainer's steps; `options` are Watch's.

    A step ends with `on_train_batch_end` of the last micro-batch of an accumulation. Raises ImportError if Lightning
    is not installed.
    """
    from lightning.pytorch import Callback

    class LightningWatch(WatchOfTrainer, Callback):
        _updates = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if self.watch is None:
                self.watch = Watch(trainer.model, trainer.optimizers, ends="step", **options).start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.watch is not None and trainer.global_step > self._updates:
                self._updates = trainer.global_step
                self.watch.step()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            if self.watch is not None:
                self.watch.stop(exception)

    return LightningWatch()
