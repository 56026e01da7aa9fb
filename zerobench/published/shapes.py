"""Words that the cells of many rows begin with. Slopes do not depend on the shape, so that it is small."""

GPT = "model=gpt model.hidden=1024 model.heads=8 model.vocabulary=1024 data=synthetic backend=simulated"

BF16 = f"{GPT} precision=bf16"

BUCKETS = "strategy.bucket_bytes=8388608"
"""8 MiB: as many whole buckets in either cell as are ever in flight."""
