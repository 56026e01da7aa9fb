"""Checkpoints: sharded, asynchronous, all or nothing, loadable at another N and stage.

    engine.save("runs/step-1000", user_state={"epoch": 3})            every rank writes its part
    handle = engine.save("runs/step-2000", asynchronous=True)         copies, then writes in a thread
    ...                                                               training goes on
    handle.wait()                                                     raises that thread's error
    user_state = engine.load("runs/step-1000")                        another engine, of any stage and N
    engine.export_safetensors("model.safetensors")                    the plain module's state, from rank 0
    engine.load_weights("pretrained/")                                only weights: safetensors, or a checkpoint

All are collective, and the folder must be visible to all ranks. contents.py lists the saved tensors and the JSON next
to them, storage.py defines the files on disk and why an interrupted save harms nothing.

[Note: continuing]
Masters, optimizer states, frozen parameters and buffers are restored bit for bit, at any stage and N. Training then
continues bit for bit at the same stage and N, and elsewhere within that engine's rounding (losses within 1e-6). A
checkpoint can be loaded across fp32 and bf16 or fp16 with fp32 masters. Options of parameter groups (lr, betas, ...)
become the checkpoint's, as in torch, except fused, foreach, capturable and differentiable, which only choose an
implementation.
"""
