"""MPI: a rank that mpirun, mpiexec or srun has started finds its launcher, and through it the others."""

from __future__ import annotations

from enroot_py.runtime.environ import is_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if not (context.settings.mpi and is_rank(context.host)):
        return
    from enroot_py.runtime import pmix, ranks

    given = ranks.variables(context.host, context.settings)
    remap_root = context.settings.remap_root
    context.environ.update(given)
    if pmix.used(given):
        libraries = pmix.Libraries(context.exists, context.environ.get("LD_LIBRARY_PATH", ""))
        context.environ.update(pmix.fitted(context.host, libraries, remap_root=remap_root))
    for path, mode, _ in pmix.directories({**context.host, **given} if given else {}, remap_root=remap_root):
        context.mount(path, path, f"x-create=dir,bind,{mode},nosuid,noexec,nodev,private,nofail,silent")
