"""Run trainings that may be interrupted at any step and resumed on a slice of another size, with the same result.

    from slurm_migbatch import elastic

    fits = elastic.Memory(bytes_per_item=90e6, fixed_bytes=3e9)
    with elastic.Trainer("checkpoints", items=len(data), effective_batch=256, fits=fits, seed=1) as run:
        state = run.restore()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        save = lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for step in run.steps(total=10_000, save=save):
            for group in optimizer.param_groups:
                group["lr"] = rate(step.number)
            for micro in step:
                loss = mean_loss(model, data, micro.indices)
                (loss * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()

Guarantees for every effective batch, every slice and any interruptions:

1. Batch. The micro-batches of a step hold the items of that step and no others, each once, none of them empty or
   larger than what fits. A step has `effective_batch` items, or the rest of its epoch.
2. Gradient. The weights of a step's micro-batches are their shares of its items, also for a smaller last one. So the
   sum of weight times the gradient of a micro-batch's mean loss is the gradient of the mean loss over the whole batch.
   (If the loss is a mean over something else, for example tokens, the program must weight it with the shares of that.)
3. Steps. They are numbered 0, 1, 2 ... over the training's whole life, each is done once in the state that is kept,
   and there are as many as in an uninterrupted run.
4. Order. Step k trains on the same items in the same order in every run: it is a function of seed, items and k.
5. Rate. `step.number` and `step.seed` are the same in every run, so learning rates and random numbers can be functions
   of them.

Only the order of floating-point additions, and with it the last digits, depends on the size of the micro-batches;
`micro=` fixes it on every slice. Layers that mix the items of a micro-batch, such as batch normalisation, depend on
its size in any case: use group or layer normalisation, or `micro=`.

Signals. USR1 or USR2: at the next step boundary a checkpoint is written, reported as `checkpoint=` in the file
that MIGBATCH_PROGRESS names, and the run pauses until TERM arrives; if it does not, it continues after `Care.idle_s`.
TERM: a checkpoint is written if there is time, then SystemExit is raised (workers of a data loader end on TERM too; if
the step fails by that, the last checkpoint counts). Every program of a job gets these signals (`scancel --full`), so a
batch script begins with `trap '' USR1 USR2` and ends with `exec python train.py`.

Checkpoints are atomic (`checkpoints.py`): whatever happens, a complete one is found, and only the work since the last
one is lost. A directory has one run at a time (`lock.py`). One process trains; several processes that share one model
are not supported.

The package needs only the standard library. torch is used if the state to save holds tensors.
"""

from slurm_migbatch.elastic.errors import ElasticError, Leave, Superseded
from slurm_migbatch.elastic.micro_batches import Micro, Step
from slurm_migbatch.elastic.slices import Memory, Slice
from slurm_migbatch.elastic.trainer import Care, Trainer

__all__ = ["Care", "ElasticError", "Leave", "Memory", "Micro", "Slice", "Step", "Superseded", "Trainer"]
