"""What a pool says where there is no room.

Responsible for the errors of requests that the engine refused. Not responsible for refusing.
"""

from __future__ import annotations

from memfit import _native
from memfit.errors import PoolError, PoolWarning
from memfit.share.pool.device import HOST

Refused = tuple[str, int, int]
"""The reason, the bytes wanted and those that could be had, where it is that."""


def refusal(name: str, refused: Refused, budget: int, device: str) -> PoolError:
    """The error for a request that the engine refused."""
    reason, wanted, available = refused
    sizes = [_native.bytes_text(size) for size in (wanted, available, budget)]
    where = "" if device == HOST else f" of `{device}`"
    messages = {
        "too_large": (
            f"`{name}` can never fit: it takes {sizes[0]} ({wanted} bytes) with its activations, "
            f"and pinned models and this thread's own uses leave {sizes[1]} ({available} bytes) of "
            f"the pool's {sizes[2]}{where}\nhint: raise the budget, or pin fewer models"
        ),
        "contended": (
            f"`{name}` has no room{where} now, and another thread that uses a model waits for one "
            "already: they could wait for each other\nhint: leave the first model's block before"
        ),
        "not_woken": f"`{name}` could not be woken; it is parked, and whole",
        "stuck": f"no room{where} for `{name}`: what is awake and not used cannot be parked",
    }
    message = messages.get(reason, f"`{name}` was refused: {reason}")
    return PoolError(message, reason, wanted or None, available if wanted else None)


def excess(name: str, took: int, counted: int, held: int, budget: int, why: str) -> PoolWarning:
    """The warning of a use that took more than it counted with.

    Args:
        name: The model.
        took: Bytes that tensors took beside the model.
        counted: Bytes that it counted with.
        held: Bytes that the pool held then.
        budget: The pool's, in bytes.
        why: Why that was not foreseen; may be empty.
    """
    text = _native.bytes_text
    kept = "within" if held <= budget else "of"
    limit = text(budget) + (f"; it was not foreseen, as {why}" if why else "")
    return PoolWarning(
        f"tensors took {text(took)} beside the model while `{name}` was used, which counted with "
        f"{text(counted)}: the pool held {text(held)} {kept} its budget of {limit}\n"
        "hint: add it with an example as large as inputs come, or say what a call takes: "
        f'`pool.use("{name}", activation_bytes=...)`'
    )


def refused_call(
    name: str, call: str, takes: int, refused: Refused, counted: int, budget: int, device: str
) -> PoolError:
    """The error for a call that is larger than what was set aside for its use.

    Args:
        name: The model.
        call: What it is called with, in words.
        takes: Bytes of the call besides the model.
        refused: What the engine said to a request for the rest.
        counted: Bytes that were set aside.
        budget: The pool's, in bytes.
        device: Where the models are.
    """
    text = _native.bytes_text
    where = "" if device == HOST else f" of `{device}`"
    said = f"`{name}` called with {call} takes {text(takes)} ({takes} bytes) beside the model"
    reason, wanted, available = refused
    if reason != "too_large":
        error = refusal(name, refused, budget, device)
        error.add_note(f"{said}, and {text(counted)} were set aside; nothing was allocated for it")
        return error
    wanted, available = wanted + counted, available + counted
    message = (
        f"{said}, {text(wanted)} ({wanted} bytes) with it, and pinned models and this thread's own "
        f"uses leave {text(available)} ({available} bytes) of the pool's {text(budget)}{where}; "
        "nothing was allocated for it\n"
        "hint: call it with less at a time, or raise the budget"
    )
    return PoolError(message, reason, wanted, available)
