"""Resolved cells for tests, without Hydra: `cell(strategy, world_size, ...)` gives what a run's config.yaml holds."""

from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from zerobench.config import schema as schemas
from zerobench.config import schema_training
from zerobench.config.cell import Cell
from zerobench.config.resolve import resolve
from zerobench.config.schema import Config, Measure

MODELS: dict[str, schemas.Model] = {
    "tiny": schemas.Gpt(layers=3, hidden=48, heads=4),
    "million": schemas.Gpt(layers=5, hidden=128, heads=4),
    "odd": schemas.Gpt(layers=3, hidden=33, heads=3, vocabulary=301, tied=False),
    "untied": schemas.Gpt(layers=3, hidden=48, heads=4, tied=False),
    "words": schemas.Gpt(layers=1, hidden=32, heads=2, vocabulary=4000),
    "gaps": schemas.Gpt(layers=2, hidden=20, heads=2, checkpointing=True),
    "checkpointed": schemas.Gpt(layers=3, hidden=48, heads=4, checkpointing=True),
    "mlp": schemas.Mlp(layers=5, hidden=70),
    "tiles": schemas.Gpt(layers=2, hidden=32, heads=2, tiles=2),
    "wide": schemas.Mlp(layers=4, hidden=320),
}


def cell(name: str, world_size: int, model: str = "tiny", target: str = "", **more: Any) -> Cell:
    """`target`: the device that fake tensors act as; `strategy`: options of the strategy `name`; everything else is a
    key of Config.
    """
    section = schemas.SCHEMAS["strategy"][name](**more.pop("strategy", {}))
    bucket_bytes = more.pop("bucket_bytes", 64 * 1024)
    if hasattr(section, "bucket_bytes"):
        section.bucket_bytes = bucket_bytes
    if more.pop("tuned", False):
        section.tuned = True
    config = Config(
        strategy=section,
        model=MODELS[model],
        data=schemas.Text(),
        optimizer=more.pop("optimizer", None) or schema_training.AdamW(),
        precision=schema_training.Fp32(),
        world_size=world_size,
        device="cpu",
        sequence=32,
        measure=Measure(steps=2, warmup=2),
    )
    config.launch.threads = 1
    draft: Any = OmegaConf.to_object(OmegaConf.structured(replace(config, **more)))
    return resolve(draft, model, [], target=target)


def sound(*arguments: Any, **more: Any) -> Cell:
    """A cell that nothing refuses."""
    one = cell(*arguments, **more)
    assert not one.problems, one.problems
    return one
