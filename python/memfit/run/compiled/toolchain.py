"""Whether Inductor can compile on this machine.

Responsible for the reasons it cannot, before anything is compiled or imported that needs it. Not
responsible for what to do then: who asks runs the eager plan.
"""

from __future__ import annotations

from importlib import import_module


def missing(device_kind: str) -> str | None:
    """What Inductor lacks to compile for a kind of device.

    Args:
        device_kind: ``cpu`` or ``cuda``.

    Returns:
        A clause, or ``None`` when it can compile.
    """
    try:
        from torch._inductor import config, cpp_builder, exc
    except ImportError as error:
        return f"this torch has no Inductor: {error}"
    if not hasattr(config, "custom_partitioner_fn"):
        return "this torch's Inductor takes no partitioner: it needs torch 2.10 or later"
    try:
        import_module("memfit.run.compiled.fit")
    except ImportError as error:
        return f"compiled plans do not know this torch: {error}"
    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError) as error:
        first = str(error).strip().splitlines()[:1] or ["no C++ compiler"]
        return f"Inductor finds no C++ compiler: {first[0]}"
    if device_kind == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Inductor finds no Triton, which it needs for CUDA"
    return None
