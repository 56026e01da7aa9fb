"""Checkpoints through torch.distributed.checkpoint (DCP): sharded, asynchronous, for another N and another stage.

    engine.save("runs/step-1000", user_state={"epoch": 3})            every rank writes what it holds
    handle = engine.save("runs/step-2000", asynchronous=True)         copies, then writes in a thread
    ...                                                               training goes on
    handle.wait()                                                     raises what went wrong
    user_state = engine.load("runs/step-1000")                        another engine, of any stage and N
    engine.export_safetensors("model.safetensors")                    the plain module's state, from rank 0
    engine.load_weights("pretrained/")                                weights alone: safetensors, or a checkpoint

All are collective, and the folder must be one that all ranks see. Read contents.py for what is saved, storage.py for
how it lies on the disk and why an interrupted save harms nothing, index.py for the JSON, planner.py for resharding.

[Note: continuing]
Masters, optimizer states, frozen parameters and buffers come back to the bit, whatever the stage and N. Training goes
on to the bit at the same stage and N; elsewhere as that engine would (losses within 1e-6). Between fp32 and bf16 or
fp16 with fp32 masters a checkpoint fits too. Options of parameter groups (lr, betas, ...) become the checkpoint's, as
in torch, but for fused, foreach, capturable and differentiable, which only say how.
"""
