"""Let a rank reach the mpirun, mpiexec or srun that started it, and through this launcher all other ranks."""

from __future__ import annotations

from enroot_py.runtime.environ import is_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if not (context.settings.mpi and is_rank(context.host)):
        return
    from enroot_py.runtime import pmix, ranks

    variables = ranks.variables(context.host, context.settings)
    remap_root = context.settings.remap_root
    context.environ.update(variables)
    if pmix.used(variables):
        libraries = pmix.Libraries(context.exists, context.environ.get("LD_LIBRARY_PATH", ""))
        context.environ.update(pmix.fitted(context.host, libraries, remap_root=remap_root))
    for path, mode, _ in pmix.directories({**context.host, **variables} if variables else {}, remap_root=remap_root):
        context.mount(path, path, f"x-create=dir,bind,{mode},nosuid,noexec,nodev,private,nofail,silent")
